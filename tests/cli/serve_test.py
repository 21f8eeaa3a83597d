"""`megatron serve` on small models: replies equal those of `generate` and `logits`, which share no code with it above the model."""
import concurrent.futures
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import unittest

import support
from ports import free_port
from serving import EXACT, GOLDEN, Server, events, train_talker
from support import FolderTest, call

ROOT = os.path.join(GOLDEN, "..", "..")


class ServeTest(FolderTest):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.mkdtemp()
        cls.model = os.path.join(cls.shared, "talker")
        train_talker(cls.model)
        cls.server = Server(cls.model, "--inference-max-requests", "4", "--inference-dynamic-batching-block-size", "8",
                            "--inference-dynamic-batching-max-tokens", "24")

    @classmethod
    def tearDownClass(cls):
        cls.server.close()
        shutil.rmtree(cls.shared)

    def generated(self, *flags, model=None):
        return json.loads(self.output("generate", "--load", model or self.model, *EXACT, "--json", "--temperature", "0", *flags))

    def greedy(self, server=None, **members):
        return (server or self.server).ok("/v1/completions", {"temperature": 0, "max_tokens": 12, **members})

    def test_it_says_where_it_is_and_what_it_serves(self):
        self.assertTrue(self.server.line.startswith("talker is served at http://127.0.0.1:"), self.server.line)
        self.assertIn("up to 4 requests at a time, of 256 tokens at most", self.server.messages())
        models = self.server.ok("/v1/models")["data"]
        self.assertEqual([(model["id"], model["max_model_len"]) for model in models], [("talker", 256)])
        health = self.server.ok("/health")
        self.assertEqual((health["ready"], health["state"]), (True, "running"))
        self.assertIn("<!doctype html>", self.server.ok("/"))
        self.assertIn("megatron_", self.server.ok("/metrics"))

    def test_texts_in_one_batch_are_those_of_generate(self):
        prompts = ["The cat", "a", "Numbers: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18", "x = [", "The cat sat on", "zz"]
        expected = self.generated("--tokens-to-generate", "12", "--prompt", *prompts)
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: self.greedy(prompt=prompt, return_token_ids=True), prompts))
        for prompt, answer, want in zip(prompts, answers, expected):
            choice = answer["choices"][0]
            self.assertEqual(choice["token_ids"][:len(want["tokens"])], want["tokens"], prompt)
            self.assertEqual(choice["text"], want["text"], prompt)
        # A list in one request, and from the cache.
        choices = self.greedy(prompt=prompts)["choices"]
        self.assertEqual([choice["text"] for choice in choices], [want["text"] for want in expected])
        again = self.greedy(prompt=prompts[2])
        self.assertGreaterEqual(again["usage"]["prompt_tokens_details"]["cached_tokens"], 8)
        self.assertEqual(again["choices"][0]["text"], expected[2]["text"])

    def test_guesses_change_no_token_and_are_counted(self):
        for flags in (["--ngram-prompt-lookup-min", "1"], ["--speculative-model", self.model]):
            with self.subTest(flags=flags):
                self.check_guesses("--num-speculative-tokens", "4", *flags)

    def check_guesses(self, *flags):
        said = ["1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2", "The cat"]
        server = Server(self.model, *flags)
        self.addCleanup(server.close)
        sums = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        for prompt in said:
            members = {"prompt": prompt, "max_tokens": 40, "logprobs": 1, "stop": ["2, 9"]}
            answer, want = self.greedy(server, **members), self.greedy(**members)
            self.assertEqual(answer["choices"], want["choices"])
            self.assertNotIn("completion_tokens_details", want["usage"])
            for name, count in answer["usage"].get("completion_tokens_details", {}).items():
                sums[name] += count
        metrics = server.ok("/metrics")
        self.assertGreater(sums["accepted_prediction_tokens"], 4)
        self.assertIn(f"megatron_accepted_draft_tokens_total {sums['accepted_prediction_tokens']}\n", metrics)
        self.assertIn(f"megatron_draft_tokens_total {sum(sums.values())}\n", metrics)
        texts = [want["text"] for want in self.generated("--tokens-to-generate", "40", "--prompt", *said)]
        self.assertEqual(texts, [got["text"] for got in self.generated("--tokens-to-generate", "40", "--prompt", *said, *flags)])

    def test_replies_are_those_of_generate(self):
        said = ["Hello there", "What is 2 + 2?"]
        expected = self.generated("--chat", "--tokens-to-generate", "10", "--prompt", *said)
        for text, want in zip(said, expected):
            body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 10}
            whole = self.server.ok("/v1/chat/completions", body)
            self.assertEqual(whole["choices"][0]["message"]["content"], want["text"])
            chunks = events(self.server.ok("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}))
            pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
            self.assertEqual("".join(pieces), want["text"])
            self.assertEqual(chunks[-1]["usage"]["completion_tokens"], whole["usage"]["completion_tokens"])

    def test_log_probabilities_are_those_of_logits(self):
        ids = [5, 80, 301, 7, 600, 42]
        out = self.path("logits.safetensors")
        self.run_ok("logits", "--load", self.model, *EXACT, "--tokens", ",".join(map(str, ids)), "--output", out)
        shape, data = support.read_safetensors(out)["logits"]
        rows = [struct.unpack_from(f"<{shape[1]}d", data, 8 * shape[1] * row) for row in range(shape[0])]
        scored = self.server.ok("/v1/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 3})
        numbers = scored["choices"][0]["logprobs"]
        for row, after in zip(rows, range(1, len(ids) + 1)):
            total = math.log(math.fsum(math.exp(value) for value in row))
            best = sorted(range(len(row)), key=lambda id: (-row[id], id))[:3]
            if after < len(ids):
                self.assertAlmostEqual(numbers["token_logprobs"][after], row[ids[after]] - total, places=5)
            for value in (row[id] - total for id in best):
                self.assertTrue(any(abs(value - given) < 1e-5 for given in numbers["top_logprobs"][after].values()), (after, value))

    def test_megatrons_text_generation(self):
        body = {"prompts": ["The cat"], "tokens_to_generate": 6, "top_k": 1, "logprobs": True}
        answer = self.server.ok("/api", body, "PUT")
        want = self.generated("--tokens-to-generate", "6", "--prompt", "The cat")[0]["text"]
        self.assertEqual(answer["text"], ["The cat" + want])
        status, refused = self.server.ask("/api", {"tokens_to_generate": 6}, "PUT")
        self.assertEqual((status, list(refused)), (400, ["message"]))

    def test_sampling_follows_its_seed(self):
        draws = [self.greedy(prompt="The", temperature=1.5, seed=seed, max_tokens=20)["choices"][0]["text"] for seed in (7, 7, 8)]
        self.assertEqual(draws[0], draws[1])
        self.assertNotEqual(draws[0], draws[2])

    def test_what_is_wrong_is_told(self):
        for body, member in (({"prompt": "a", "max_tokens": 300}, "max_tokens"), ({"prompt": [10 ** 6]}, "prompt"),
                             ({"prompt": "a", "model": "another"}, "model"), ({"prompt": "a", "temperature": -1}, "temperature")):
            status, answer = self.server.ask("/v1/completions", body)
            self.assertIn(status, (400, 404))
            self.assertEqual(answer["error"]["param"], member)
        status, answer = self.server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "{}"}],
                                                                  "response_format": {"type": "json_object"}})
        if status != 200:  # without `make grammars`
            self.assertEqual((status, answer["error"]["param"]), (400, "response_format"))
        self.assertEqual(self.server.ask("/health", headers={"Host": "evil.example"})[0], 403)

    def test_other_commands_are_its_clients(self):
        chat = subprocess.run([support.BINARY, "chat", "--url", self.server.url, "--temperature", "0", "--max-tokens", "10"],
                              input="Hello there\n", capture_output=True, text=True, timeout=60)
        want = self.generated("--chat", "--tokens-to-generate", "10", "--prompt", "Hello there")[0]["text"]
        self.assertEqual(chat.stdout, want + "\n", chat.stderr)
        load = json.loads(self.output("bench", "serve", "--url", self.server.url, "--num-requests", "9", "--concurrency", "6", "--num-warmup",
                                      "1", "--prompt-tokens", "20", "--output-tokens", "5", "--json"))
        self.assertEqual((load["completed"], load["failed"], load["output_tokens"]), (9, 0, 45))

    def test_without_a_server(self):
        """chat and bench serve load a model themselves."""
        chat = subprocess.run([support.BINARY, "chat", self.model, *EXACT, "--temperature", "0", "--max-tokens", "10"],
                              input="Hello there\n", capture_output=True, text=True, timeout=60)
        want = self.generated("--chat", "--tokens-to-generate", "10", "--prompt", "Hello there")[0]["text"]
        self.assertEqual(chat.stdout, want + "\n", chat.stderr)
        load = json.loads(self.output("bench", "serve", "--load", self.model, *EXACT, "--num-requests", "5", "--concurrency", "3", "--num-warmup",
                                      "1", "--prompt-tokens", "20", "--output-tokens", "5", "--json"))
        self.assertEqual((load["completed"], load["failed"], load["output_tokens"]), (5, 0, 25))
        shared = support.call("bench", "serve", "--load", self.model, *EXACT, "--num-requests", "5", "--num-warmup", "0", "--concurrency", "1",
                              "--prompt-tokens", "200", "--prefix-tokens", "192", "--output-tokens", "1", "--inference-max-seq-length", "256")
        self.assertIn("prompts: 768 of 1000 tokens were in the cache", shared.stderr)
        text = self.output("bench", "serve", "--load", self.model, *EXACT, "--num-requests", "5", "--prompt-tokens", "20", "--output-tokens", "5")
        bound = re.search(r"bound of this machine: copies of [\d.]+ TB/s and products of [\d.]+ TFLOP/s allow [\d.]+ ms between tokens and "
                          r"([\d.]+) generated tokens/s, of which ([\d.]+)% were seen", text)
        self.assertIsNotNone(bound, text)
        self.assertTrue(0 < float(bound[2]) < 100 and float(bound[1]) > 0, bound[0])

    def copy_llama(self):
        """A tiny Llama of Hugging Face, with a tokenizer whose words are w0 to w39."""
        base = self.path("llama")
        shutil.copytree(os.path.join(GOLDEN, "hf", "llama2"), base)
        words = {f"w{i}": i for i in range(40)}
        with open(os.path.join(base, "tokenizer.json"), "w") as stream:
            json.dump({"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
                       "post_processor": None, "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}, stream)
        return base

    def test_end_tokens_of_a_model(self):
        base = self.copy_llama()

        def write(name, value):
            with open(os.path.join(base, name), "w") as stream:
                json.dump(value, stream)

        for id in (-2, 40, 10 ** 6):
            write("generation_config.json", {"eos_token_id": id})
            self.assertIn(f"the end token {id} is outside the vocabulary, 0 to 39", call("serve", base, "--port", "0", *EXACT).stderr)
        for id in ("x", 2 ** 31):
            write("generation_config.json", {"eos_token_id": id})
            self.assertIn("generation_config.json: eos_token_id is ", call("serve", base, "--port", "0", *EXACT).stderr)
        os.remove(os.path.join(base, "generation_config.json"))
        with open(os.path.join(base, "config.json")) as stream:
            config = json.load(stream)
        del config["eos_token_id"]
        write("config.json", config)
        server = Server(base)
        self.addCleanup(server.close)
        for _ in range(2):
            self.assertEqual(self.greedy(server, prompt="w1 w2")["choices"][0]["finish_reason"], "length")
        self.assertEqual(server.messages().count("name no end token: replies end by their length alone"), 1)

    def test_it_listens_at_one_address(self):
        sockets = {os.readlink(f"/proc/{self.server.process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{self.server.process.pid}/fd")}
        listening = []
        for table in ("tcp", "tcp6", "udp", "udp6"):
            with open(f"/proc/net/{table}") as stream:
                for row in list(map(str.split, stream))[1:]:
                    # 0A: a socket of TCP that listens; 07: one of UDP.
                    if row[3] in ("0A", "07") and f"socket:[{row[9]}]" in sockets:
                        listening.append((table, row[1]))
        self.assertEqual(listening, [("tcp", f"0100007F:{self.server.port:04X}")])

    def test_adapters_and_other_weights(self):
        """Requests name adapters as their model; weights are exchanged while the server runs."""
        base = self.copy_llama()
        adapter = os.path.join(GOLDEN, "lora", "llama_all")
        prompt = "w5 w6 w7 w3"
        plain, adapted = (self.generated("--tokens-to-generate", "12", "--ignore-eod", "--prompt", prompt, *more, model=base)[0]["tokens"]
                          for more in ([], ["--adapter", adapter]))
        self.assertNotEqual(plain, adapted)
        server = Server(base, "--adapter", "tuned=" + adapter, "--served-model-name", "base")
        self.addCleanup(server.close)

        def tokens(model):
            answer = self.greedy(server, prompt=prompt, model=model, ignore_eos=True, return_token_ids=True)
            return answer["choices"][0]["token_ids"]

        for _ in range(2):
            self.assertEqual(tokens("base"), plain)
            self.assertEqual(tokens("tuned"), adapted)
        self.assertIn("no chat template", server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})[1]["error"]["message"])
        self.assertEqual(server.stop(), 0)

        first, last = (self.generated("--tokens-to-generate", "12", "--prompt", "The cat", "--ckpt-step", step)[0]["text"] for step in "12")
        self.assertNotEqual(first, last)
        server = Server(self.model)
        self.addCleanup(server.close)
        self.assertEqual(self.greedy(server, prompt="The cat")["choices"][0]["text"], last)
        source = next(os.path.join(self.model, name) for name in os.listdir(self.model) if name.endswith("1") and "iter" in name)
        self.assertEqual(server.ok("/admin/update_weights", {"source": source, "version": 1})["state"], "running")
        again = self.greedy(server, prompt="The cat", return_token_ids=True)["choices"][0]
        self.assertEqual((again["text"], set(again["weights_versions"])), (first, {1}))
        # Neither cache nor weights in memory, and back.
        for command in ("pause", "suspend", "resume"):
            body = {"cache": "drop", "weights": "drop"} if command == "suspend" else {}
            server.ok("/admin/" + command, body)
        self.assertEqual(self.greedy(server, prompt="The cat")["choices"][0]["text"], first)
        status, answer = server.ask("/admin/update_weights", {"source": base, "version": 2})
        self.assertEqual(status, 500)
        self.assertIn("holds another model", answer["error"]["message"])
        self.assertEqual(self.greedy(server, prompt="The cat")["choices"][0]["text"], first)
        self.assertEqual(server.stop(), 0)

    def test_a_signal_drains(self):
        server = Server(self.model, "--inference-max-requests", "2")
        self.addCleanup(server.close)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"prompt": "The cat", "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        first = response.read1(20)
        done = threading.Event()
        threading.Thread(target=lambda: (server.process.wait(60), done.set()), daemon=True).start()
        server.process.send_signal(signal.SIGTERM)
        text = first.decode() + response.read().decode()
        self.assertEqual(events(text)[-1]["choices"][0]["finish_reason"], "length")
        connection.close()
        self.assertTrue(done.wait(30))
        self.assertEqual(server.process.returncode, 0, server.messages())
        self.assertIn("signal received: no new requests", server.messages())
        with self.assertRaises(OSError):
            server.ask("/health")

    @unittest.skipUnless(shutil.which("curl"), "no curl")
    def test_commands_of_the_manual(self):
        """The first block of docs/serving.md as it is written, at a free port."""
        with open(os.path.join(ROOT, "docs", "serving.md"), encoding="utf-8") as stream:
            block = stream.read().split("```")[1]
        port = str(free_port())
        os.symlink(os.path.join(ROOT, "tests"), self.path("tests"))
        os.makedirs(self.path("build/bin"))
        os.symlink(support.BINARY, self.path("build/bin/megatron"))
        done = subprocess.run(["bash", "-uc", block.replace("8000", port)], cwd=self.folder, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        for part in (f"model is served at http://127.0.0.1:{port}", '"ready": true', '"object": "text_completion"', "data: [DONE]", '"segments"',
                     "20 completed, 0 failed"):
            self.assertIn(part, done.stdout)

    def test_a_failure_ends_it(self):
        server = Server(self.model, "--step-timeout-seconds", "1e-9")
        self.addCleanup(server.close)
        status, answer = server.ask("/v1/completions", {"prompt": "The cat"})
        self.assertEqual(status, 500, answer)
        self.assertEqual(server.process.wait(30), 1)
        self.assertIn("error: the engine has failed: ", server.messages())

    def test_an_operator_stops_it(self):
        server = Server(self.model)
        self.addCleanup(server.close)
        self.assertEqual(server.ok("/admin/drain", {})["state"], "stopped")
        self.assertEqual(server.process.wait(30), 0)

    def test_what_is_refused_before_a_model_is_read(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            for flags, parts in ((["--port", port], ["port " + port]), (["--host", "0.0.0.0"], ["--host 0.0.0.0 lets other machines in", "--no-auth"]),
                                 (["--adapter", "x"], ["--adapter x is not NAME=DIR"]),
                                 (["--num-speculative-tokens", "65"], ["--num-speculative-tokens 65 is outside [0, 64]"]),
                                 (["--speculative-model", "x"], ["--speculative-model has no effect without --num-speculative-tokens"]),
                                 (["--ngram-prompt-lookup-min", "9"], ["--ngram-prompt-lookup-max 8 is outside [9, 1024]"]),
                                 (["--device", "cuda"], [] if os.path.exists("/dev/nvidiactl") else ["no usable GPU is found"]),
                                 (["--tensor-model-parallel-size", "2"], ["are 2 ranks, and one was started"]),
                                 (["--inference-max-requests", "0", "--inference-dynamic-batching-max-tokens", "0"],
                                  ["--inference-max-requests 0 is outside", "--inference-dynamic-batching-max-tokens 0 is outside"])):
                result = call("serve", "/nowhere", "--device", "cpu", *flags)
                self.assertNotEqual(result.returncode, 0)
                for part in parts:
                    self.assertIn(part, result.stderr)
        result = call("serve", self.model, "--port", "0", *EXACT, "--inference-dynamic-batching-buffer-size-gb", "1e-9")
        self.assertIn("GiB holds 0 blocks of 64 tokens, and 1 is needed", result.stderr)
        self.assertIn("hint: raise --inference-dynamic-batching-buffer-size-gb", result.stderr)
        for draft, why in ((os.path.join("evaluate", "model"), ": its tokenizer has "), (os.path.join("hf", "bamba"), ": a draft model is a decoder without states"),
                           (os.path.join("encoders", "sentence"), ": a draft model is a decoder without states of fixed size, and this is a model of type"),
                           ("nowhere", ": there is no such folder")):
            result = call("serve", self.model, "--port", "0", *EXACT, "--num-speculative-tokens", "2", "--speculative-model", os.path.join(GOLDEN, draft))
            self.assertEqual(result.returncode, 1)
            self.assertIn(draft + why, result.stderr)
        # Every flag that training answers with "megatron serve takes this flag or says why not".
        with open(os.path.join(ROOT, "docs", "flags.md"), encoding="utf-8") as stream:
            rows = [line.split("`") for line in stream if "the engine is that of megatron serve" in line]
        self.assertGreater(len(rows), 30)
        flags = [part for row in rows for part in [row[1], *row[3:4]]]
        result = call("serve", "/nowhere", "--device", "cpu", *flags)
        self.assertNotIn("unknown", result.stderr)
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        result = subprocess.run([support.BINARY, "serve", self.model, "--port", "0"], capture_output=True, text=True, timeout=60, env=environment)
        self.assertIn("--tensor-model-parallel-size 1 and --pipeline-model-parallel-size 1 are 1 rank, and 2 were started", result.stderr)
        result = call("serve", self.model, "--port", "0", "--tensor-model-parallel-size", "2")
        self.assertIn("are 2 ranks, and one was started\nhint: torchrun --no-python --nproc-per-node 2 megatron serve", result.stderr)


if __name__ == "__main__":
    support.main()
