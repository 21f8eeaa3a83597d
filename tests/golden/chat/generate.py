#!/usr/bin/env python3
"""Writes cases.json: what `transformers` makes of every template here and every conversation.

Ran with transformers 5.23.0, jinja2 3.1.6:
    python tests/golden/chat/generate.py
The templates are in the published forms (ChatML, Llama, Qwen, Mistral, Gemma, Phi, OLMo, Zephyr, DeepSeek, Command R), in
words of their own; parts.jinja walks through the rest of the language.
"""
import datetime
import json
import pathlib

import jinja2
import transformers
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
NOW = 1767225600  # 2026-01-01 00:00:00 UTC
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather of a place.",
        "parameters": {"type": "object", "required": ["place"], "properties": {
            "place": {"type": "string", "description": "a town, such as \"Z\u00fcrich\""},
            "days": {"type": "integer"},
            "hours": {"type": "array", "items": {"type": "number"}, "description": "local\nhours"}}}}},
    {"type": "function", "function": {
        "name": "stop", "parameters": {"type": "object", "required": [], "properties": {}}}},
]
CALL = {"id": "call00001", "type": "function",
        "function": {"name": "get_weather", "arguments": {"place": "Z\u00fcrich", "days": 2, "deep": {"a": [1, 2.5, None, True]}}}}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


U, A, S = (lambda c: message("user", c)), (lambda c: message("assistant", c)), (lambda c: message("system", c))
CONVERSATIONS = {
    "one": {"messages": [U("Hello")]},
    "two": {"messages": [U("Hello"), A("Hi there.")]},
    "system": {"messages": [S("You are terse."), U("Why?"), A("Because."), U("And then?"), A("Then it ended.")]},
    "open": {"messages": [S(" padded system \n"), U("  q1\n"), A("\n a1 "), U("q2")]},
    "unicode": {"messages": [U("\u65e5\u672c\u8a9e \U0001f389 na\u00efve \"quoted\" 'single' <b>&amp;</b> {{ braces }} {% raw"), A("l\u00ednea\n\n\tdos\\n")]},
    "empty": {"messages": [S(""), U(""), A("")]},
    "think": {"messages": [U("2+2?"), A("<think>\nadd them\n</think>\n\nIt is 4."), U("sure?"), A("<think>yes</think>Sure.")]},
    "reasoning": {"messages": [U("2+2?"), {**A("4"), "reasoning_content": "add\n"}]},
    "no thinking": {"messages": [U("2+2?")], "variables": {"enable_thinking": False, "date": "01 Feb 2025"}},
    "not alternating": {"messages": [U("a"), U("b"), A("c")]},
    "assistant first": {"messages": [A("c"), U("b")]},
    "unknown role": {"messages": [U("a"), message("critic", "b")]},
    "tools": {"messages": [U("Weather?")], "tools": TOOLS},
    "tools and system": {"messages": [S("Be brief."), U("Weather in Z\u00fcrich?")], "tools": TOOLS},
    "call": {"messages": [U("Weather?"), message("assistant", None, tool_calls=[CALL]),
                          message("tool", "{\"sun\": true}", tool_call_id="call00001", name="get_weather"), A("Sunny."),
                          U("Thanks")], "tools": TOOLS},
    "two calls": {"messages": [U("Weather?"), message("assistant", "Let me see.", tool_calls=[CALL, CALL]),
                               message("tool", "sun", tool_call_id="call00001"), message("tool", "rain", tool_call_id="call00001"),
                               A("Mixed.")]},
    "parts": {"messages": [U([{"type": "text", "text": "look "}, {"type": "image"}, {"type": "text", "text": "here"}]), A("ok")]},
    "mapping": {"messages": [U("x"), A("y"), message("tool", {"content": {"n": 1, "\u00e9": [False]}}, tool_call_id="call00001")]},
    "long": {"messages": [m for i in range(6) for m in (U(f"question {i}"), A(f"answer {i}"))]},
    "no messages": {"messages": []},
}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc)


def byte_spans(text, spans):
    return [[len(text[:a].encode()), len(text[:b].encode())] for a, b in spans]


def main():
    chat_template_utils.datetime = Clock
    cases = []
    for path in sorted((HERE / "templates").glob("*.jinja")):
        source = path.read_text()
        compiled = chat_template_utils._compile_jinja_template(source)
        for name, c in CONVERSATIONS.items():
            for prompt in (False, True):
                case = {"template": path.name, "conversation": name, "add_generation_prompt": prompt}
                arguments = dict(messages=c["messages"], tools=c.get("tools"), documents=None, add_generation_prompt=prompt,
                                 **TOKENS, **c.get("variables", {}))
                try:
                    if "{% generation" in source:
                        text, spans = chat_template_utils._render_with_assistant_indices(compiled, **arguments)
                        case["generated"] = byte_spans(text, spans)
                    else:
                        text = compiled.render(**arguments)
                    case["text"] = text
                except Exception as error:  # noqa: BLE001: whatever it raises, we have to refuse as well
                    case["error"] = f"{type(error).__name__}: {error}"
                cases.append(case)
    out = {"versions": {"transformers": transformers.__version__, "jinja2": jinja2.__version__}, "now": NOW, "tokens": TOKENS,
           "conversations": CONVERSATIONS, "cases": cases}
    lines = json.dumps({k: v for k, v in out.items() if k != "cases"}, ensure_ascii=False, separators=(",", ":"))[:-1]
    (HERE / "cases.json").write_text(lines + ', "cases": [\n' + ",\n".join(json.dumps(c, ensure_ascii=False, separators=(",", ":")) for c in cases) + "\n]}\n")
    good = sum("text" in c for c in cases)
    print(f"{len(cases)} cases, {good} texts, {len(cases) - good} refusals")


if __name__ == "__main__":
    main()
