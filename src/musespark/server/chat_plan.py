"""A chat request on its way to the engine: checked, rendered, queued."""

import asyncio
from dataclasses import dataclass, replace

from musespark.chat.format import Prompt
from musespark.chat.parser import TurnParser
from musespark.chat.template import DEFAULT_REASONING_EFFORT
from musespark.chat.tools import Tool, ToolChoice, parse_tool_choice, parse_tools
from musespark.engine.client import EngineClient, EngineRequest
from musespark.errors import RequestError
from musespark.server.context import Context, new_id
from musespark.server.forced import ForcedRun
from musespark.server.protocol.chat import ChatRequest
from musespark.server.runs import MergedRun, Run, start_runs
from musespark.server.settings import sampling_params, stop_texts, structured_output
from musespark.server.turn import TurnRules


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """All that is decided before the engine hears of a request."""

    engine_request: EngineRequest
    prompt: Prompt
    tools: tuple[Tool, ...]
    """The tools the model is shown."""
    choice: ToolChoice
    rules: TurnRules


def plan_chat(context: Context, request: ChatRequest) -> ChatPlan:
    """Check, render and tokenize. Takes time with long conversations, so it runs in a thread.

    Raises:
        RequestError: the request can never be honoured.
    """
    context.check_choices(request.n)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs: needs logprobs to be true.")
    declared = parse_tools(request.tools)
    choice = parse_tool_choice(request.tool_choice, declared)
    tools = () if choice.mode == "none" else declared
    rule = structured_output(request.response_format, request.structured_outputs, context.scope)
    if choice.names and (request.continue_final_message or not request.add_generation_prompt):
        raise RequestError(
            "tool_choice: a call can only be asked for at the beginning of a new turn."
        )
    prompt = context.chat.prompt(
        request.messages,
        tools,
        reasoning_effort=request.reasoning_effort or DEFAULT_REASONING_EFFORT,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=request.chat_template_kwargs,
    )
    params = sampling_params(
        request,
        context.defaults,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    rules = TurnRules(
        stop=stop_texts(request),
        min_tokens=request.min_tokens,
        may_call=choice.mode != "none",
        one_call=not request.parallel_tool_calls,
    )
    engine_request = EngineRequest(new_id("chatcmpl"), prompt.token_ids, params, rule)
    return ChatPlan(engine_request, prompt, tools, choice, rules)


def new_parser(context: Context, plan: ChatPlan) -> TurnParser:
    """A parser that begins where the prompt ends."""
    return context.chat.parser(plan.prompt, plan.tools)


async def start_chat(context: Context, request: ChatRequest) -> tuple[ChatPlan, Run]:
    """Plan a request and queue it.

    Raises:
        MuseSparkError: it cannot be honoured, or not now.
    """
    context.check_model(request.model)
    engine = context.engine
    plan = await asyncio.to_thread(plan_chat, context, request)
    context.check_length(len(plan.prompt.token_ids), engine.info.max_model_len, "messages")
    if plan.choice.names:
        return plan, await _start_forced(context, engine, plan)
    return plan, await start_runs(engine, [plan.engine_request])


async def _start_forced(context: Context, engine: EngineClient, plan: ChatPlan) -> Run:
    """One run for each output, since each may need a call brought about in its own place."""
    if len(plan.choice.names) > 1 and not engine.info.structured_output:
        raise RequestError(
            "tool_choice: 'required' with several tools needs structured output, which this "
            "server was started without. Name one tool."
        )
    whole = plan.engine_request
    runs: list[ForcedRun] = []
    try:
        for index in range(whole.params.n):
            seed = whole.params.seed
            params = replace(
                whole.params, n=1, seed=None if seed is None else (seed + index) % 2**63
            )
            request = replace(whole, request_id=f"{whole.request_id}-{index}", params=params)
            parser = new_parser(context, plan)
            runs.append(await ForcedRun.start(engine, request, context.chat, plan.choice, parser))
    except BaseException:
        for run in runs:
            await run.aclose()
        raise
    return runs[0] if len(runs) == 1 else MergedRun(runs)
