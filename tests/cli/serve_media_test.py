"""Servers of models that read images and sounds: the tokens of transformers and of generate, and what clients send wrongly."""
import base64
import json
import os
import re
import subprocess
import threading
import wave
import zlib

import support
from image_prompts_test import families, media, write_model
from serving import Ranks, Server, events

EXACT = ["--device", "cpu", "--dtype", "fp32", "--num-threads", "1"]
GREEDY = {"max_tokens": 64, "temperature": 0, "return_token_ids": True}


def part(path, kind="image"):
    with open(path, "rb") as file:
        data = base64.b64encode(file.read()).decode()
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/any;base64,{data}"}}


def png(width, height, rows=None, told=None):
    """A black one; `rows`: that are there; `told`: the size that it tells."""
    def chunk(name, data):
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")
    pixels = zlib.compress(bytes((3 * width + 1) * (rows or height)))
    header = b"".join(side.to_bytes(4, "big") for side in told or (width, height)) + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def user(text, *parts):
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class ServeMediaTest(support.FolderTest):
    def model(self, family):
        folder = self.path(family)
        facts = next(row for row in families() if row["family"] == family)
        write_model(folder, facts)
        return folder, facts

    def serve(self, *flags):
        server = Server(*flags, exact=EXACT)
        self.addCleanup(server.close)
        return server

    def reply(self, server, messages, **more):
        answer = server.ok("/v1/chat/completions", {"messages": messages, **GREEDY, **more})
        choice = answer["choices"][0]
        self.assertEqual(answer["usage"]["prompt_tokens"], len(choice["prompt_token_ids"]))
        return choice, answer["usage"]

    def turns(self, facts):
        kind = facts.get("kind", "image")
        first, second = (user(turn["text"], part(media(turn["file"])[0], kind)) for turn in facts["turns"])
        return [first], [first, {"role": "assistant", "content": facts["turns"][0]["said"]}, second]

    def check_turns(self, server, facts):
        for messages, turn in zip(self.turns(facts), facts["turns"]):
            choice, _ = self.reply(server, messages)
            self.assertEqual(choice["prompt_token_ids"], turn["prompt_tokens"], facts["family"])
            self.assertEqual(choice["token_ids"], turn["tokens"], facts["family"])

    def test_replies_are_those_of_transformers(self):
        for family in ("gemma3", "qwen2_5_vl", "qwen2_audio"):
            folder, facts = self.model(family)
            flags = ["--inference-dynamic-batching-buffer-size-gb", "0.001", "--max-media", "7"]
            server = self.serve(folder, *flags)
            self.check_turns(server, facts)
            self.assertEqual(server.stop(), 0)
            # What encoders take is a part of the plan.
            told = re.search(r"the largest prompt of images or sounds (.*), together (.*)", server.messages()).groups()
            plan = self.output("check", "--serve", folder, "--device", "cpu", "--dtype", "fp32", *flags)
            self.assertRegex(plan, f"encoders of images and sounds: .* of the weights; the largest prompt takes {told[0]}\n")
            self.assertIn(told[1], plan)
        none = self.output("check", "--serve", folder, "--device", "cpu", "--dtype", "fp32", "--max-media", "0")
        self.assertIn("the largest prompt takes 0 B\n", none)

    def test_equal_ids_of_different_images_share_nothing(self):
        folder, facts = self.model("llava")
        server = self.serve(folder)
        self.check_turns(server, facts)
        # One after the other and together: the ids are equal, the images are not.
        text, files = facts["turns"][0]["text"], media("1_img1.jpg", "3_img1.png", "0_img1.png", "4_img1.webp")
        alone = [self.generate(folder, text, file) for file in files]
        self.assertEqual(len({str(reply["prompt_tokens"]) for reply in alone}), 1)
        self.assertGreater(len({str(reply["tokens"]) for reply in alone}), 1)
        for _ in range(2):
            for file, own in zip(files, alone):
                choice, usage = self.reply(server, [user(text, part(file))])
                self.assertEqual((choice["token_ids"], usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)), (own["tokens"], 0))
        replies = [None] * len(files)

        def ask(i):
            replies[i] = self.reply(server, [user(text, part(files[i]))])[0]["token_ids"]

        threads = [threading.Thread(target=ask, args=[i]) for i in range(len(files))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(replies, [reply["tokens"] for reply in alone])
        # Streams, several texts of one prompt, and ids without a reply.
        self.check_stream(server, facts)
        whole = server.ok("/v1/chat/completions", {"messages": self.turns(facts)[1], **GREEDY, "n": 3})
        self.assertEqual([choice["token_ids"] for choice in whole["choices"]], 3 * [facts["turns"][1]["tokens"]])
        ids = server.ok("/tokenize", {"messages": self.turns(facts)[1]})
        self.assertEqual(ids["tokens"], facts["turns"][1]["prompt_tokens"])
        # The template takes parts alone; a text is one, and its prompt is shared.
        replies = [self.reply(server, [{"role": "user", "content": content}]) for content in (80 * "a ", [{"type": "text", "text": 80 * "a "}])]
        self.assertEqual(replies[0][0]["token_ids"], replies[1][0]["token_ids"])
        self.assertGreater(len(replies[0][0]["prompt_token_ids"]), 160)
        self.assertGreater(replies[1][1]["prompt_tokens_details"]["cached_tokens"], 64)
        alone = json.loads(self.output("generate", folder, "--chat", "--prompt", 80 * "a ", "--greedy", "--tokens-to-generate", "64", "--json", *EXACT))
        self.assertEqual(alone[0]["prompt_tokens"], replies[0][0]["prompt_token_ids"])
        self.assertEqual(alone[0]["tokens"], [token for token in replies[0][0]["token_ids"] if token != 37])  # <|im_end|>
        with open(self.path("texts.jsonl"), "w") as file:
            json.dump({"messages": [{"role": "user", "content": 80 * "a "}]}, file)
        rows = json.loads(self.output("generate", folder, "--chat", "--prompts-file", self.path("texts.jsonl"), "--greedy", "--tokens-to-generate",
                                      "64", "--json", *EXACT))
        self.assertEqual(rows[0]["tokens"], alone[0]["tokens"])
        self.assertEqual(server.stop(), 0)

    def generate(self, folder, text, file):
        out = self.output("generate", folder, "--chat", "--prompt", text, "--image", file, "--greedy", "--tokens-to-generate", "64", "--json", *EXACT)
        return json.loads(out)[0]

    def check_stream(self, server, facts):
        body = {"messages": self.turns(facts)[1], **GREEDY, "stream": True, "stream_options": {"include_usage": True}}
        chunks = events(server.ok("/v1/chat/completions", body))
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        whole = server.ok("/v1/chat/completions", {**body, "stream": False, "stream_options": None})
        self.assertEqual(text, whole["choices"][0]["message"]["content"])
        self.assertEqual(chunks[-1]["usage"]["prompt_tokens"], len(facts["turns"][1]["prompt_tokens"]))

    def test_chat_shows_images(self):
        folder, facts = self.model("llava")
        first, second = facts["turns"]
        said = "".join(f"/image {media(turn['file'])[0]}\n{turn['text']}\n" for turn in (first, second))
        result = subprocess.run([support.BINARY, "chat", "--load", folder, "--temperature", "0", "--max-tokens", "64", *EXACT],
                                input=said, capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(result.stdout.startswith(first["said"] + "\n"), result.stdout)
        self.assertTrue(result.stdout.endswith(second["said"] + "\n"), result.stdout)
        result = subprocess.run([support.BINARY, "chat", "--load", folder, *EXACT], input="/image /no/such.png\nhi\n", capture_output=True,
                                text=True, timeout=60)
        self.assertIn("/no/such.png", result.stderr)
        self.assertNotEqual(result.returncode, 0)

    def refused(self, server, parts, message, status=400, **more):
        code, answer = server.ask("/v1/chat/completions", {"messages": [user("what?", *parts)], **GREEDY, **more})
        self.assertEqual((code, message in answer["error"]["message"]), (status, True), answer)
        self.assertNotRegex(answer["error"]["message"], r"\n|0x[0-9a-fA-F]{9}")  # one line, and no address of the server's memory

    def test_what_is_wrong_with_media_is_a_400(self):
        folder, facts = self.model("llava")
        server = self.serve(folder, "--max-media", "3", "--max-image-pixels", "100000")
        image = media("1_img1.jpg")[0]
        with open(image, "rb") as file:
            data = file.read()

        def bad(content):
            with open(self.path("bad"), "wb") as file:
                file.write(content)
            return part(self.path("bad"))

        self.refused(server, [bad(data[:-20])], "messages[0].content[0]: byte")
        self.refused(server, [part(image), bad(b"")], "messages[0].content[1]")
        self.refused(server, [bad(b"GIF89a" + bytes(100))], "GIF")
        self.refused(server, [bad(png(400, 400))], "400x400")
        self.refused(server, [bad(png(20000, 20000, rows=1))], "20000x20000")
        self.refused(server, 4 * [part(image)], "more than 3 images and sounds in one request (--max-media)")
        self.refused(server, [part(media("odd.wav")[0], "audio")], "the model reads no sounds")
        self.refused(server, [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{server.port}/"}}], "the server fetches nothing")
        self.refused(server, [{"type": "image_url", "image_url": {"url": image}}], "the server reads no files for clients")
        self.refused(server, [part(image), {"type": "text", "text": "an <image>"}], "the text holds <image>")
        self.refused(server, [part(image)], "prompt_logprobs", prompt_logprobs=1)
        self.refused(server, [{"type": "text", "text": 600 * "a "}, part(image)], "beyond the model's context of 512")
        self.refused(server, [{"type": "text", "text": "an <image>"}], "the text holds <image>")
        code, answer = server.ask("/v1/completions", {"prompt": "an <image>"})
        self.assertEqual((code, answer["error"]["param"]), (400, "prompt"))
        self.assertIn("the prompt has the token of an image, 39, and no image in its place", answer["error"]["message"])
        self.check_turns(server, facts)  # it lives on
        self.assertEqual(server.stop(), 0)

    def resident(self, server):
        with open(f"/proc/{server.process.pid}/status") as file:
            return int(re.search(r"VmRSS:\s+(\d+) kB", file.read())[1]) / 1024

    def test_abuse_leaves_a_server_as_it_was(self):
        """Each is a 400 of one line; memory stays where it was."""
        folder, facts = self.model("llava")
        server = self.serve(folder)
        self.check_turns(server, facts)
        image, data = media("1_img1.jpg")[0], part(media("1_img1.jpg")[0])["image_url"]["url"]
        small = base64.b64encode(png(1, 1)).decode()
        bomb = base64.b64encode(png(8000, 8000)).decode()  # 192 MB of pixels in 190 kB
        high = base64.b64encode(png(1, 1 << 16, rows=1)).decode()

        def url(text):
            return [{"type": "image_url", "image_url": {"url": text}}]
        cases = [
            (url("data:image/png;base64," + base64.b64encode(png(1, 1, told=(65535, 65535))).decode()), "65535x65535"),
            (url("data:image/png;base64," + base64.b64encode(png(1, 1, told=(1 << 30, 1 << 30))).decode()), "1073741824x1073741824"),
            (url("data:image/png;base64," + high), "messages[0].content[0]"),
            (url("data:image/png;base64," + bomb[:len(bomb) // 8 * 4]), "messages[0].content[0]"),
            (url(data[:len(data) // 2 // 4 * 4]), "messages[0].content[0]"),
            (url("data:image/png;base64,!!!!"), "base64"),
            (url(data[:-1] + "?"), "base64"),
            (url("data:image/png;base64,"), "messages[0].content[0]"),
            (url("data:image/png," + small), "base64"),
            (url("data:"), "messages[0].content[0]"),
            (url("data:image/png;base64," + 8000000 * "A"), "messages[0].content[0]"),
            (1000 * url("data:image/png;base64," + small), "more than 64 images and sounds"),
            (64 * url("data:image/png;base64," + small), "beyond the model's context of 512"),
        ]
        deep = []
        for _ in range(300):
            deep = [deep]
        before = self.resident(server)
        for _ in range(3):
            for parts, message in cases:
                self.refused(server, parts, message)
            code, answer = server.ask("/v1/chat/completions", {"messages": deep})
            self.assertEqual((code, "nested deeper than" in answer["error"]["message"]), (400, True), answer)
        self.assertLess(self.resident(server) - before, 256)  # MiB; what threads freed stays in their heaps
        self.check_turns(server, facts)
        self.assertEqual(server.stop(), 0)

    def test_sounds_of_another_rate_are_a_400(self):
        folder, facts = self.model("qwen2_audio")
        server = self.serve(folder)
        for rate, channels, message in ((44100, 1, "44100"), (16000, 2, "channel")):
            with wave.open(self.path("other.wav"), "wb") as file:
                file.setparams((channels, 2, rate, 0, "NONE", ""))
                file.writeframes(bytes(2 * channels * rate))
            self.refused(server, [part(self.path("other.wav"), "audio")], message)
        with open(self.path("other.wav"), "rb") as file:
            header = bytearray(file.read(44))
        header[22:24], header[24:28], header[40:44] = (1).to_bytes(2, "little"), (16000).to_bytes(4, "little"), (1 << 30).to_bytes(4, "little")
        with open(self.path("other.wav"), "wb") as file:
            file.write(header)  # says that a gigabyte follows
        self.refused(server, [part(self.path("other.wav"), "audio")], "messages[0].content[0]")
        self.check_turns(server, facts)
        self.assertEqual(server.stop(), 0)

    def test_weights_that_are_suspended_encode_nothing(self):
        folder, facts = self.model("llava")
        server = self.serve(folder)
        server.ok("/admin/pause", {"mode": "keep"})
        server.ok("/admin/suspend", {"weights": "drop"})
        self.refused(server, [part(media("1_img1.jpg")[0])], "the weights are suspended", status=503)
        server.ok("/admin/resume", {})
        self.check_turns(server, facts)
        self.assertEqual(server.stop(), 0)

    def test_tensor_ranks(self):
        """The first rank encodes; all of them look texts up."""
        for family, ranks in (("llava", 2), ("qwen2_vl", 4)):
            folder, facts = self.model(family)
            served = Ranks(ranks, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", str(ranks // 2), folder, "--dtype", "fp32")
            self.addCleanup(served.close)
            self.check_turns(served, facts)
            self.assertEqual(served.stop()[0], 0)

    def test_stages_and_checkpoints(self):
        folder, facts = self.model("llava")
        stages = Ranks(2, "--pipeline-model-parallel-size", "2", folder, "--dtype", "fp32")
        self.addCleanup(stages.close)
        self.check_turns(stages, facts)
        self.assertEqual(stages.stop()[0], 0)
        self.output("convert-checkpoint", "--load", folder, "--save", self.path("ours"))
        server = self.serve(self.path("ours"), "--media-model", folder)
        self.check_turns(server, facts)
        self.assertEqual(server.stop(), 0)
        server = self.serve(self.path("ours"), "--chat-template", os.path.join(folder, "chat_template.jinja"))
        self.refused(server, [part(media("1_img1.jpg")[0])], "has no image processor (preprocessor_config.json)")
        self.assertEqual(server.stop(), 0)
        self.assertIn("images and sounds are refused", server.messages())


if __name__ == "__main__":
    support.main()
