"""Output that must follow a grammar, through the xgrammar library.

A grammar is compiled once for a request; each of its outputs has a matcher of its own, which says
before each token what may come, and is told what came. The library is imported when the first
grammar is asked for.
"""

import importlib.util
import json
import re
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from musespark.config.structured_output import AnswerScope, GrammarKind, StructuredOutput
from musespark.engine.answer_tracker import AnswerTracker
from musespark.errors import RequestError

# A grammar's text may come from anybody, and compiling takes time and memory.
_MAX_BODY = 200_000
# What following a grammar may take, since everybody waits meanwhile. Usual grammars take a tenth of
# it; ambiguous patterns such as ((a+)+)+ take longer with every token.
_FREE_SECONDS = 1.0
_SECONDS_PER_TOKEN = 0.005
# Spaces in a row between the parts of a JSON text; a model could go on with them forever.
_MAX_WHITESPACE = 20
_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")


class Grammar:
    """A compiled grammar, and which part of the output it is for."""

    def __init__(
        self, compiled: Any, scope: AnswerScope | None, usable: Tensor, vocab_size: int
    ) -> None:
        """`usable` [ceil(V / 32)] int32 are the tokens that the grammar may use at all."""
        self._compiled, self._scope = compiled, scope
        self._usable, self._vocab_size = usable, vocab_size

    def constrain(self, prompt: Sequence[int], end_token_ids: frozenset[int]) -> "Constraint":
        """The constraint of one output behind `prompt`.

        Raises:
            RequestError: the prompt ends within an answer that does not fit the grammar.
        """
        scope = self._scope
        ends = end_token_ids if scope is None else frozenset(scope.turn_end_ids)
        tracker = None if scope is None else AnswerTracker(scope, prompt)
        ends = frozenset(token_id for token_id in ends if token_id < self._vocab_size)
        constraint = Constraint(self._compiled, tracker, sorted(ends), self._usable)
        for token_id in tracker.begun_answer if tracker is not None else ():
            if not constraint.matches(token_id):
                raise RequestError(
                    "The answer that the prompt begins does not fit the output format that the "
                    "request asks for. Change one of them."
                )
        return constraint


class Constraint:
    """What one output may still become."""

    def __init__(
        self,
        compiled: Any,
        tracker: AnswerTracker | None,
        end_token_ids: list[int],
        usable: Tensor,
    ) -> None:
        import xgrammar

        self._tracker, self._usable, self._has_end = tracker, usable, bool(end_token_ids)
        self._matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=end_token_ids or None
        )
        self._seconds_left = _FREE_SECONDS
        self.is_finished = False
        """Whether nothing more may follow."""
        self.is_too_slow = False
        """Whether it has ended because following the grammar takes too long."""

    def fill_allowed(self, bitmask: Tensor, row: int, ahead: Sequence[int] = ()) -> list[int]:
        """Write which tokens may come next, and behind each token of `ahead`, which are only
        guessed, into rows of `bitmask` [N, ceil(V / 32)] int32 from `row` on.

        Returns:
            The rows written: those where the next token is constrained, none behind a guess that
            the grammar refuses, since nothing behind it will be taken.
        """
        started = time.perf_counter()
        tracker = self._tracker if self._tracker is None or not ahead else self._tracker.copy()
        rows: list[int] = []
        num_matched = 0
        for place in range(row, row + len(ahead) + 1):
            is_active = tracker is None or tracker.in_answer
            if is_active:
                self._matcher.fill_next_token_bitmask(bitmask, place)
                bitmask[place] &= self._usable
                rows.append(place)
            if place == row + len(ahead):
                break
            token_id = ahead[place - row]
            if is_active:
                if not self.matches(token_id):
                    break
                num_matched += 1
                if self._matcher.is_terminated():
                    break
            if tracker is not None:
                tracker.push(token_id)
        if num_matched:
            self._matcher.rollback(num_matched)
        # Guesses cost time of their own, and each may bring a token.
        self._seconds_left += _SECONDS_PER_TOKEN * num_matched - (time.perf_counter() - started)
        return rows

    def matches(self, token_id: int) -> bool:
        """Whether `token_id` fits as the next token of the answer, which it then is."""
        return bool(self._matcher.accept_token(token_id))

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen."""
        if self._tracker is None or self._tracker.in_answer:
            started = time.perf_counter()
            fits = self.matches(token_id)
            self.is_finished = not fits or self._matcher.is_terminated() or self._is_exhausted()
            self._seconds_left += _SECONDS_PER_TOKEN - (time.perf_counter() - started)
            if self._seconds_left < 0 and not self.is_finished:
                self.is_finished = self.is_too_slow = True
        if self._tracker is not None:
            self._tracker.push(token_id)

    def _is_exhausted(self) -> bool:
        """Whether the text is complete, nothing can follow, and no token could say so."""
        if self._has_end or not self._matcher.is_completed():
            return False
        bitmask = torch.zeros_like(self._usable)[None]
        self.fill_allowed(bitmask, 0)
        return not bool(bitmask.any())


class GrammarCompiler:
    """Compiles grammars over one model's vocabulary."""

    def __init__(self, vocabulary: Sequence[bytes], vocab_size: int) -> None:
        """`vocabulary` holds the bytes of each token, none for special ones."""
        self._vocabulary, self._vocab_size = list(vocabulary[:vocab_size]), vocab_size

    @cached_property
    def _compiler(self) -> Any:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            self._vocabulary,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=[],
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 * 2**20)

    @cached_property
    def _all_tokens(self) -> Tensor:
        return pack_bitmask(torch.ones(self._vocab_size, dtype=torch.bool))

    @cached_property
    def _json_tokens(self) -> Tensor:
        """All but those with control characters, which the library lets pass in some strings and
        JSON does not; line feeds it does know about."""
        usable = torch.ones(self._vocab_size, dtype=torch.bool)
        for token_id, text in enumerate(self._vocabulary):
            usable[token_id] = not _CONTROL.search(text)
        return pack_bitmask(usable)

    def compile(self, wanted: StructuredOutput) -> Grammar:
        """The grammar of `wanted`; takes milliseconds, or seconds for a large one.

        Raises:
            RequestError: it is no valid schema, pattern or list of choices.
        """
        name = wanted.kind.value
        if len(wanted.body) > _MAX_BODY:
            raise RequestError(
                f"{name}: has {len(wanted.body)} characters; {_MAX_BODY} are allowed."
            )
        try:
            compiled = self._compile(wanted)
        except RequestError:
            raise
        except Exception as error:  # the library's own classes, and what its C++ side throws
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = _SOURCE_LINE.sub("", lines[-1])
            raise RequestError(f"{name}: cannot be used: {reason}") from None
        is_json = wanted.kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA)
        usable = self._json_tokens if is_json else self._all_tokens
        return Grammar(compiled, wanted.scope, usable, self._vocab_size)

    def _compile(self, wanted: StructuredOutput) -> Any:
        if wanted.kind is GrammarKind.JSON_OBJECT:
            # Not the library's "any JSON": that also allows lists and bare numbers.
            return self._compile_schema('{"type": "object"}')
        if wanted.kind is GrammarKind.JSON_SCHEMA:
            check_schema(json.loads(wanted.body))
            return self._compile_schema(wanted.body)
        if wanted.kind is GrammarKind.REGEX:
            return self._compiler.compile_regex(wanted.body)
        choices = (json.dumps(text, ensure_ascii=False) for text in json.loads(wanted.body))
        return self._compiler.compile_grammar("root ::= " + " | ".join(choices))

    def _compile_schema(self, schema: str) -> Any:
        # Properties that a schema does not name are allowed, as JSON Schema has it.
        return self._compiler.compile_json_schema(
            schema, strict_mode=False, max_whitespace_cnt=_MAX_WHITESPACE
        )


def check_schema(schema: Any) -> None:
    """Refuse what the library would take for "anything goes".

    Raises:
        RequestError: no schema, or one that refers to somewhere else.
    """
    if not isinstance(schema, dict | bool):
        raise RequestError("json_schema: must be a JSON schema, which is an object.")
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#"):
                raise RequestError(
                    f"json_schema: $ref {reference!r} points outside of the schema. Put what it "
                    "refers to under $defs."
                )
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def has_grammar_library() -> bool:
    """Whether grammars can be compiled here."""
    return importlib.util.find_spec("xgrammar") is not None


def new_bitmask(num_rows: int, vocab_size: int) -> Tensor:
    """[num_rows, ceil(V / 32)] int32 with no token allowed yet."""
    return torch.zeros((num_rows, -(-vocab_size // 32)), dtype=torch.int32)


def pack_bitmask(allowed: Tensor) -> Tensor:
    """[ceil(V / 32)] int32 from [V] bool, the lowest bit first."""
    padded = torch.nn.functional.pad(allowed, (0, -len(allowed) % 32)).view(-1, 32).long()
    return (padded << torch.arange(32)).sum(dim=-1).to(torch.int32)


def unpack_bitmask(bitmask: Tensor, vocab_size: int) -> Tensor:
    """[N, V] bool from [N, ceil(V / 32)] int32, the lowest bit first."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return (bitmask[:, :, None] >> bits & 1).bool().flatten(1)[:, :vocab_size]
