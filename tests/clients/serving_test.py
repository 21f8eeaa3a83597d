#!/usr/bin/env python3
"""`megatron serve` asked by programs that are not ours: the openai package, requests as Megatron-LM's text_generation_cli.py uses it, curl,
promtool, and Chromium with the chat page.

Usage: serving_test.py BINARY [unittest arguments], with these on the path (make clients sets them up). PICTURES: a folder for
pictures of the page.
"""
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
import typing
import unittest

import openai
import pydantic
import requests

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import support  # noqa: E402
from serving import EXACT, GOLDEN, Ranks, Server, train_talker  # noqa: E402

import chromium  # noqa: E402
import served_model  # noqa: E402
from served_model import NAME  # noqa: E402

KEY = "a-key-of-the-operators"
WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "The weather of a city", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Bonn", "Ulm"]}, "days": {"enum": [1, 2, 3]}}, "required": ["city", "days"],
        "additionalProperties": False}}}

# What Megatron-LM's tools/text_generation_cli.py does: ADDRESS, and on standard input a prompt and a number, again and again.
COMMAND_LINE = """
import json
import sys

import requests

while True:
    prompt = input("Enter prompt: ")
    data = {"prompts": [prompt], "tokens_to_generate": int(input("Enter number of tokens to generate: "))}
    response = requests.put("http://" + sys.argv[1] + "/api", data=json.dumps(data), headers={"Content-Type": "application/json"})
    if response.status_code != 200:
        print(f"Error {response.status_code}: {response.json()['message']}")
    else:
        print("Megatron Response: ")
        print(response.json()["text"][0])
"""

# The texts that lm-evaluation-harness gets for questions: URL FOLDER.
HARNESS_CHATS = """
import json
import os
import sys

import lm_eval
from lm_eval.models.openai_completions import LocalChatCompletion
from lm_eval.tasks import TaskManager

url, folder = sys.argv[1:]
task = {"task": "questions", "dataset_path": "json", "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}", "dataset_kwargs": {"data_files": {"test": os.path.join(folder, "questions.jsonl")}},
        "generation_kwargs": {"until": ["."], "max_gen_toks": 12, "temperature": 0, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
with open(os.path.join(folder, "questions.yaml"), "w") as stream:
    json.dump(task, stream)
model = LocalChatCompletion(base_url=url + "/v1/chat/completions", model="MODEL", num_concurrent=4)
found = lm_eval.simple_evaluate(model=model, tasks=["questions"], task_manager=TaskManager(include_path=folder), bootstrap_iters=0,
                                apply_chat_template=True)
samples = sorted(found["samples"]["questions"], key=lambda sample: sample["doc_id"])
print(json.dumps({"texts": [sample["resps"][0][0] for sample in samples], "score": found["results"]["questions"]["exact_match,none"]}))
""".replace("MODEL", NAME)

# A program that runs lm-evaluation-harness on files: URL FOLDER.
HARNESS_TASKS = """
import json
import os
import sys

import lm_eval
import yaml
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

url, folder = sys.argv[1:]
tasks = os.path.join(os.path.dirname(lm_eval.__file__), "tasks")
names = ["piqa_file", "lambada_file"]
for name, source in zip(names, ("piqa/piqa.yaml", "lambada/lambada_openai.yaml")):
    with open(os.path.join(tasks, source)) as stream:
        task = yaml.safe_load(stream)
    for key in ("dataset_name", "validation_split", "training_split", "tag"):
        task.pop(key, None)
    task.update(task=name, dataset_path="json", test_split="test",
                dataset_kwargs={"data_files": {"test": os.path.join(folder, name.removesuffix("_file") + ".jsonl")}})
    with open(os.path.join(folder, name + ".yaml"), "w") as stream:
        yaml.safe_dump(task, stream)
model = LocalCompletionsAPI(base_url=url + "/v1/completions", model="MODEL", tokenizer_backend="remote", num_concurrent=4, max_length=96,
                            batch_size=1)
found = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=TaskManager(include_path=folder), bootstrap_iters=0)
logprobs = []
for name in names:
    for sample in sorted(found["samples"][name], key=lambda sample: sample["doc_id"]):
        for answer in sample["resps"]:
            logprobs.append(float((answer[0] if isinstance(answer[0], (list, tuple)) else answer)[0]))
print(json.dumps({"results": {name: {key: value for key, value in found["results"][name].items() if isinstance(value, float)}
                              for name in names}, "logprobs": logprobs}))
""".replace("MODEL", NAME)


class ClientsTest(support.FolderTest):
    @classmethod
    def setUpClass(cls):
        cls.model = served_model.path()
        cls.server = Server(cls.model, "--tool-call-parser", "hermes", *served_model.FLAGS)
        cls.openai = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.server.close()

    def generated(self, *flags):
        return json.loads(self.output("generate", "--load", self.model, *EXACT, "--json", "--temperature", "0", "--tokens-to-generate", "10", *flags))[0]["text"]

    def test_openai_completions(self):
        want = self.generated("--prompt", "The cat")
        given = dict(model=NAME, prompt="The cat", max_tokens=10, temperature=0)
        whole = self.openai.completions.create(**given, logprobs=2, n=2, seed=5)
        self.assertEqual([choice.text for choice in whole.choices], [want, want])
        self.assertEqual(len(whole.choices[0].logprobs.tokens), whole.usage.completion_tokens // 2)
        chunks = list(self.openai.completions.create(**given, stream=True, stream_options={"include_usage": True}))
        self.assertEqual("".join(chunk.choices[0].text for chunk in chunks if chunk.choices), want)
        self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens // 2)

    def test_openai_conversations(self):
        want = self.generated("--chat", "--prompt", "Hello there")
        given = dict(model=NAME, messages=[{"role": "user", "content": "Hello there"}], max_completion_tokens=10, temperature=0)
        reply = self.openai.chat.completions.create(**given, logprobs=True, top_logprobs=3)
        self.assertEqual(reply.choices[0].message.content, want)
        self.assertEqual(len(reply.choices[0].logprobs.content), reply.usage.completion_tokens)
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}]
        self.assertIn(self.openai.chat.completions.create(**given, tools=tools).choices[0].finish_reason, ("stop", "length", "tool_calls"))
        with self.openai.chat.completions.stream(**given) as stream:
            self.assertEqual("".join(event.delta for event in stream if event.type == "content.delta"), want)

        async def streamed(client):
            stream = await client.chat.completions.create(**given, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def many():
            client = openai.AsyncOpenAI(base_url=self.server.url + "/v1", api_key="none", max_retries=0)
            replies = await asyncio.gather(*(client.chat.completions.create(**given) for _ in range(15)))
            pieces = await asyncio.gather(*(streamed(client) for _ in range(5)))
            await client.close()
            return [reply.choices[0].message.content for reply in replies] + pieces

        self.assertEqual(asyncio.run(many()), [want] * 20)

    def grammars(self):
        """Skips where the server has none: they need `make grammars`."""
        status, answer = self.server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": ["a"]}})
        if status != 200:
            self.assertEqual(answer["error"]["param"], "structured_outputs.choice")
            self.skipTest(answer["error"]["message"])

    def test_openai_json_schemas(self):
        self.grammars()

        class Animal(pydantic.BaseModel):
            kind: typing.Literal["cat", "dog", "bird"]
            legs: typing.Literal[2, 4]
            tame: bool

        ask = {"model": NAME, "messages": [{"role": "user", "content": "Describe an animal as JSON."}], "max_completion_tokens": 200}
        for seed in range(4):
            reply = self.openai.chat.completions.parse(**ask, response_format=Animal, temperature=1.5, seed=seed)
            self.assertIsInstance(reply.choices[0].message.parsed, Animal)
        with self.openai.chat.completions.stream(**ask, response_format=Animal, temperature=0) as stream:
            self.assertIsInstance(stream.get_final_completion().choices[0].message.parsed, Animal)
        # Any object; whatever a model that is very warm writes, it is JSON.
        for seed in range(2):
            text = self.openai.chat.completions.create(**ask, response_format={"type": "json_object"}, temperature=1.5, seed=seed)
            if text.choices[0].finish_reason == "stop":
                self.assertIsInstance(json.loads(text.choices[0].message.content), dict)

    def test_json_schemas_over_two_ranks(self):
        """Tensor ranks and stages, of a tiny model that both divide: the texts of one rank, all of them valid."""
        self.grammars()
        model = self.path("talker")
        train_talker(model)
        schema = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog", "bird"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99},
                                                   "tame": {"type": "boolean"}}, "required": ["kind", "legs", "tame"], "additionalProperties": False}
        body = {"prompt": ["An animal: ", "{"], "max_tokens": 100, "n": 2, "return_token_ids": True,
                "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}}
        asked = [{**body, "temperature": temperature, "seed": seed} for seed, temperature in enumerate((0, 1.0, 1.5))]
        servers = [Server(model), *(Ranks(2, model, f"--{axis}-model-parallel-size", "2") for axis in ("tensor", "pipeline"))]
        for server in servers:
            self.addCleanup(server.close)
        texts = [[(choice["text"], choice["token_ids"]) for members in asked for choice in server.ok("/v1/completions", members)["choices"]]
                 for server in servers]
        self.assertEqual(texts[1], texts[0])
        self.assertEqual(texts[2], texts[0])
        for text, _ in texts[0]:
            self.assertEqual(set(json.loads(text)), {"kind", "legs", "tame"})
        self.assertGreater(len({text for text, _ in texts[0]}), 3)

    def test_openai_tools_are_called(self):
        self.grammars()
        ask = {"model": NAME, "messages": [{"role": "user", "content": "What is the weather in Bonn?"}], "tools": [WEATHER],
               "max_completion_tokens": 200, "temperature": 1.0, "parallel_tool_calls": False}
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            for seed in range(3):
                reply = self.openai.chat.completions.create(**ask, tool_choice=choice, seed=seed).choices[0]
                self.assertEqual((reply.finish_reason, len(reply.message.tool_calls)), ("tool_calls", 1))
                called = reply.message.tool_calls[0].function
                arguments = json.loads(called.arguments)
                self.assertEqual(called.name, "weather")
                self.assertIn(arguments.pop("city"), ("Bonn", "Ulm"))
                self.assertIn(arguments.pop("days"), (1, 2, 3))
                self.assertEqual(arguments, {})
        with self.openai.chat.completions.stream(**ask, tool_choice="required", seed=7) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
        whole = self.openai.chat.completions.create(**ask, tool_choice="required", seed=7).choices[0].message.tool_calls[0]
        self.assertEqual(json.loads(streamed.function.arguments), json.loads(whole.function.arguments))
        # The answer of the tool goes back to the model.
        told = [*ask["messages"], {"role": "assistant", "tool_calls": [whole.model_dump()]},
                {"role": "tool", "tool_call_id": whole.id, "content": "rain"}]
        self.assertTrue(self.openai.chat.completions.create(model=NAME, messages=told, max_completion_tokens=8).choices[0].message.content)

    def test_openai_errors(self):
        self.assertEqual([model.id for model in self.openai.models.list()], [NAME])
        with self.assertRaises(openai.NotFoundError) as raised:
            self.openai.completions.create(model="another", prompt="a")
        self.assertEqual(raised.exception.param, "model")
        with self.assertRaises(openai.BadRequestError) as raised:
            self.openai.completions.create(model=NAME, prompt="a", max_tokens=10 ** 6)
        self.assertEqual(raised.exception.param, "max_tokens")
        with self.assertRaises(openai.APITimeoutError):
            self.openai.with_options(timeout=0.02).completions.create(model=NAME, prompt="a", max_tokens=2000, extra_body={"ignore_eos": True})
        # The request of the client that left was cancelled.
        deadline = time.monotonic() + 30
        while self.server.ok("/admin/status")["running"] > 0:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_keys(self):
        with open(self.path("keys"), "w") as stream:
            stream.write(f"team:{KEY}\n")
        os.chmod(self.path("keys"), 0o600)
        server = Server(self.model, "--api-key-file", self.path("keys"), *served_model.FLAGS)
        self.addCleanup(server.close)
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0).models.list()
        self.assertEqual(openai.OpenAI(base_url=server.url + "/v1", api_key=KEY).models.list().data[0].id, NAME)

    def test_megatrons_command_line(self):
        """As tools/text_generation_cli.py of Megatron-LM asks and reads."""
        def put(data):
            return requests.put(self.server.url + "/api", data=json.dumps(data), headers={"Content-Type": "application/json"}, timeout=60)

        asked = subprocess.run([sys.executable, "-c", COMMAND_LINE, f"127.0.0.1:{self.server.port}"], capture_output=True, text=True,
                               input="The cat\n5\nThe cat\n-5\n", timeout=60)
        self.assertIn("EOFError", asked.stderr)
        said = asked.stdout.replace("Enter prompt: ", "").replace("Enter number of tokens to generate: ", "")
        self.assertTrue(said.startswith("Megatron Response: \nThe cat"), said)
        self.assertIn("\nError 400: tokens_to_generate -5 is outside", said)
        answer = put({"prompts": ["The cat"], "tokens_to_generate": 5})
        self.assertEqual(answer.status_code, 200)
        self.assertTrue(answer.json()["text"][0].startswith("The cat"))
        refused = put({"prompts": ["The cat"], "tokens_to_generate": -5})
        self.assertNotEqual(refused.status_code, 200)
        self.assertIn("tokens_to_generate", refused.json()["message"])

    def curl(self, *arguments):
        return subprocess.run(["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "30", *arguments],
                              capture_output=True, text=True, check=True).stdout

    def test_curl(self):
        want = self.generated("--prompt", "The cat")
        body = json.dumps({"prompt": "The cat", "max_tokens": 10, "temperature": 0, "stream": True})
        for flags in ([], ["--http1.0"], ["-H", "Expect: 100-continue"], ["-H", "Transfer-Encoding: chunked"]):
            text = self.curl("--no-buffer", "-d", body, *flags, self.server.url + "/v1/completions")
            self.assertTrue(text.endswith("data: [DONE]\n\n"), text)
            chunks = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
            self.assertEqual("".join(chunk["choices"][0]["text"] for chunk in chunks), want)
        both = self.curl(self.server.url + "/health", self.server.url + "/v1/models")
        self.assertIn('"ready"', both)
        self.assertIn(f'"{NAME}"', both)

    @unittest.skipUnless(importlib.util.find_spec("lm_eval"), "no lm_eval")
    def test_lm_evaluation_harness(self):
        """Its local-completions, with the server's tokenizer, against `megatron evaluate`."""
        folder, server = os.path.join(GOLDEN, "evaluate"), self.server
        keys = {"piqa": ("goal", "sol1", "sol2"), "lambada": ("text",)}
        # The harness cuts long inputs at another place.
        for task, names in keys.items():
            with open(os.path.join(folder, "data", task + ".jsonl"), encoding="utf-8") as stream:
                rows = [json.loads(line) for line in stream]
            short = [row for row in rows if server.ok("/tokenize", {"prompt": " ".join(row[name] for name in names)})["count"] < 80]
            self.assertGreater(len(short), 1)
            with open(self.path(task + ".jsonl"), "w", encoding="utf-8") as stream:
                stream.writelines(json.dumps(row) + "\n" for row in short)
        with open(self.path("tasks.py"), "w") as stream:
            stream.write(HARNESS_TASKS)
        ours = {result["task"]: result for result in json.loads(self.output(
            "evaluate", "--load", self.model, *EXACT, "--json", "--log-samples", self.path("ours.jsonl"), "--tasks",
            *(f"{task}={self.path(task)}.jsonl" for task in keys)))["results"]}
        theirs = self.harness()
        self.assertEqual(theirs["results"]["piqa_file"]["acc,none"], ours["piqa"]["acc"])
        self.assertEqual(theirs["results"]["piqa_file"]["acc_norm,none"], ours["piqa"]["acc_norm"])
        self.assertEqual(theirs["results"]["lambada_file"]["acc,none"], ours["lambada"]["acc"])
        self.assertAlmostEqual(theirs["results"]["lambada_file"]["perplexity,none"] / ours["lambada"]["perplexity"], 1, delta=1e-6)
        with open(self.path("ours.jsonl"), encoding="utf-8") as stream:
            wanted = [choice["logprob"] for line in stream for choice in json.loads(line)["choices"]]
        self.assertEqual(len(wanted), len(theirs["logprobs"]))
        for want, given in zip(wanted, theirs["logprobs"]):
            self.assertAlmostEqual(given / want, 1, delta=1e-6)

    def harness(self):
        """The last line of tasks.py."""
        done = subprocess.run([sys.executable, self.path("tasks.py"), self.server.url, self.folder], capture_output=True, text=True, timeout=600,
                              env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": self.path("cache")})
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout.splitlines()[-1])

    @unittest.skipUnless(importlib.util.find_spec("lm_eval"), "no lm_eval")
    def test_lm_evaluation_harness_chats(self):
        """Its local-chat-completions gets the texts of `megatron generate --chat`."""
        questions = ["What is the capital of France?", "Name a colour.", "How many legs has a cat?", "Who wrote Hamlet?"]
        wanted = json.loads(self.output("generate", "--load", self.model, *EXACT, "--json", "--temperature", "0", "--tokens-to-generate", "12",
                                        "--chat", "--stop", ".", "--prompt", *questions))
        wanted = [answer["text"] for answer in wanted]
        with open(self.path("questions.jsonl"), "w") as stream:
            stream.writelines(json.dumps({"question": question, "answer": want}) + "\n" for question, want in zip(questions, wanted))
        with open(self.path("tasks.py"), "w") as stream:
            stream.write(HARNESS_CHATS)
        found = self.harness()
        self.assertEqual(found["texts"], wanted)
        self.assertEqual(found["score"], 1.0)

    def test_promtool(self):
        subprocess.run(["promtool", "check", "metrics"], input=self.curl(self.server.url + "/metrics"), text=True, check=True)

    @staticmethod
    def long_message(server):
        """One to which the model replies without an end."""
        for text in ("Go on", "Tell me", "Count", "What?", "x", "Hello", "Why", "1 2 3", "a b", "yes"):
            body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 100}
            if server.ok("/v1/chat/completions", body)["choices"][0]["finish_reason"] == "length":
                return text
        raise AssertionError("all replies end")

    @unittest.skipUnless(chromium.program(), "no chromium")
    def test_the_page_in_chromium(self):
        server = Server(self.model, *served_model.FLAGS)
        self.addCleanup(lambda: server.close())
        page = chromium.Page()
        self.addCleanup(page.close)
        pictures = os.environ.get("PICTURES", self.folder)
        page.open(server.url)
        page.wait_for("document.querySelector('#state').textContent === 'ready'")
        page.picture(os.path.join(pictures, "empty.png"))

        def say(text):
            page.value("document.querySelector('#input').focus()")
            page.type(text)
            page.press("Enter")

        page.click("#options")
        page.value("document.querySelector('#temperature').value = 0; document.querySelector('#max_tokens').value = 10")
        page.click("#options")
        say("Hello there")
        page.wait_for("document.querySelectorAll('.turn.assistant').length === 1 && document.querySelector('#send').textContent === 'Send'")
        note = page.value("document.querySelector('.turn.assistant .below').textContent")
        self.assertIn("tokens", note)
        want = self.generated("--chat", "--prompt", "Hello there")
        kept = page.value("JSON.parse(sessionStorage.getItem('megatron-chat')).messages")
        self.assertEqual([message["content"] for message in kept], ["Hello there", want])
        page.picture(os.path.join(pictures, "reply.png"))
        # A long reply is stopped, and the server stops computing it.
        page.value("document.querySelector('#max_tokens').value = ''")
        page.click("#new")
        say(self.long_message(server))
        page.wait_for("(document.querySelector('.turn.writing .text') || {textContent: ''}).textContent.length > 5")
        page.press("Escape")
        page.wait_for("document.querySelector('#send').textContent === 'Send'")
        self.assertIn("stopped", page.value("document.querySelector('main').textContent"))
        deadline = time.monotonic() + 30
        while server.ok("/admin/status")["running"] > 0:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        # The server goes, and another comes at its place; the conversation stays, also when the page is loaded again.
        port = str(server.port)
        self.assertEqual(server.stop(), 0)
        page.wait_for("document.querySelector('#state').className === 'bad'")
        server = Server(self.model, "--port", port, *served_model.FLAGS)
        page.wait_for("document.querySelector('#state').textContent === 'ready'")
        page.open(server.url)
        page.wait_for("document.querySelector('#state').textContent === 'ready'")
        self.assertEqual(page.value("document.querySelectorAll('.turn').length"), 2)
        page.value("document.querySelector('#max_tokens').value = 10")
        say("And now?")
        page.wait_for("document.querySelectorAll('.turn.assistant').length === 2 && document.querySelector('#send').textContent === 'Send'")
        page.picture(os.path.join(pictures, "restarted.png"))
        foreign = [url for url in page.requests if not url.startswith((server.url, "data:"))]
        self.assertEqual(foreign, [])
        self.assertEqual([problem for problem in page.problems if "CONNECTION_REFUSED" not in problem], [])


if __name__ == "__main__":
    support.main()
