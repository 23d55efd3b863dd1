// A small part of Markdown, as DOM nodes. Text only ever becomes text: nothing here parses HTML.

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;

function inline(parent, text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(end, match.index));
    const [whole, code, strong, emphasis] = match;
    const node = document.createElement(code ? "code" : strong ? "strong" : "em");
    node.textContent = code ?? strong ?? emphasis;
    parent.append(node);
    end = match.index + whole.length;
  }
  parent.append(text.slice(end));
}

function element(parent, tag, text) {
  const node = document.createElement(tag);
  if (text !== undefined) inline(node, text);
  parent.append(node);
  return node;
}

function list(parent, lines, tag, marker) {
  const items = element(parent, tag);
  for (const line of lines) element(items, "li", line.replace(marker, ""));
}

const BULLET = /^\s*[-*] /;
const NUMBER = /^\s*\d+[.)] /;
const HEADING = /^#{1,6} /;

// Lines from `start` on for which `belongs` holds.
function take(lines, start, belongs) {
  let end = start;
  while (end < lines.length && belongs(lines[end])) end += 1;
  return lines.slice(start, end);
}

function isPlain(line) {
  return line.trim() && ![BULLET, NUMBER, HEADING, /^```/, /^> /].some((mark) => mark.test(line));
}

/** Replace what `parent` holds with `text`, rendered. An unfinished code block is a code block. */
export function render(parent, text) {
  const top = document.createDocumentFragment();
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; ) {
    const line = lines[i];
    let taken;
    if (line.startsWith("```")) {
      taken = take(lines, i + 1, (other) => !other.startsWith("```"));
      const code = element(element(top, "pre"), "code");
      code.textContent = taken.join("\n");
      i += taken.length + 2;
    } else if (HEADING.test(line)) {
      element(top, "h3", line.replace(HEADING, ""));
      i += 1;
    } else if (BULLET.test(line)) {
      taken = take(lines, i, (other) => BULLET.test(other));
      list(top, taken, "ul", BULLET);
      i += taken.length;
    } else if (NUMBER.test(line)) {
      taken = take(lines, i, (other) => NUMBER.test(other));
      list(top, taken, "ol", NUMBER);
      i += taken.length;
    } else if (line.startsWith("> ")) {
      taken = take(lines, i, (other) => other.startsWith("> "));
      element(top, "blockquote", taken.map((other) => other.slice(2)).join("\n"));
      i += taken.length;
    } else if (line.trim()) {
      taken = take(lines, i, isPlain);
      if (!taken.length) taken = [line];
      element(top, "p", taken.join("\n"));
      i += taken.length;
    } else {
      i += 1;
    }
  }
  parent.replaceChildren(top);
}
