"""`megatron chat --url` and `megatron bench serve --url` against a server of the OpenAI API that is not ours."""
import http.server
import json
import os
import pty
import subprocess
import threading
import time

import support
from support import FolderTest, call


class Api(http.server.BaseHTTPRequestHandler):
    """Replies to "x" with "You said: x" and a letter of two bytes, in pieces; refuses "refuse me"; asks for the key KEY if there is one."""
    protocol_version = "HTTP/1.1"
    key = None
    bodies = []

    def log_message(self, *arguments):
        pass

    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refused(self):
        if not self.key or self.headers["Authorization"] == "Bearer " + self.key:
            return False
        self.answer(401, b'{"error": {"message": "who are you?"}}')
        return True

    def do_GET(self):
        if self.refused():
            return
        if self.path == "/v1/models":
            self.answer(200, b'{"object": "list", "data": [{"id": "parrot"}]}')
        else:
            self.answer(404, b'{"error": {"message": "no such route"}}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.refused():
            return
        if self.path == "/v1/completions":
            return self.stream([{"text": "a"} for _ in range(body["max_tokens"])], len(body["prompt"]), body["max_tokens"])
        said = body["messages"][-1]["content"]
        if said == "refuse me":
            return self.answer(400, b'{"error": {"message": "no, I will not"}}')
        pieces = ["You said: ", said, " \u00e9"]
        self.stream([{"delta": {"content": piece}} for piece in pieces], 5, len(pieces))

    def stream(self, choices, prompt_tokens, output_tokens):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        choices[-1]["finish_reason"] = "stop"
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
        for chunk in [{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": usage}]:
            # Characters of more than one byte come as they are, cut in the middle of an event.
            data = ("data: " + json.dumps(chunk, ensure_ascii=False) + "\n\n").encode()
            for part in (data[:-5], data[-5:]):
                self.wfile.write(part)
                self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")


class ChatTest(FolderTest):
    def setUp(self):
        super().setUp()
        Api.key, Api.bodies = None, []
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.url = f"http://127.0.0.1:{server.server_port}"

    def chat(self, text, *flags, **environment):
        return subprocess.run([support.BINARY, "chat", *flags], input=text, capture_output=True, text=True, timeout=60,
                              env={**os.environ, "OMP_NUM_THREADS": "1", **environment})

    def refused(self, arguments, *parts):
        result = call(*arguments)
        self.assertNotEqual(result.returncode, 0, result.stdout)
        for part in parts:
            self.assertIn(part, result.stderr)

    def test_lines_of_a_pipe_are_messages(self):
        result = self.chat("one\ntwo \\\nlines\n", "--url", self.url, "--system", "be brief", "--max-tokens", "9", "--temperature", "0")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(result.stdout, "You said: one \u00e9\nYou said: two \nlines \u00e9\n")
        last = Api.bodies[-1]
        self.assertEqual([message["role"] for message in last["messages"]], ["system", "user", "assistant", "user"])
        self.assertEqual((last["model"], last["max_tokens"], last["temperature"]), ("parrot", 9, 0))

    def test_a_refused_message_ends_a_pipe(self):
        result = self.chat("refuse me\nnever asked\n", "--url", self.url)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("no, I will not", result.stderr)
        self.assertEqual(len(Api.bodies), 1)

    def test_keys(self):
        Api.key = "a-key-of-the-server"
        result = self.chat("hi\n", "--url", self.url, OPENAI_API_KEY="")
        self.assertIn("who are you?\nhint: --api-key-file FILE", result.stderr)
        with open(self.path("key"), "w") as stream:
            stream.write("# of the team\nme:a-key-of-the-server:admin\n")
        self.assertIn("You said: hi", self.chat("hi\n", "--url", self.url, "--api-key-file", self.path("key")).stdout)
        self.assertIn("You said: hi", self.chat("hi\n", "--url", self.url, OPENAI_API_KEY="a-key-of-the-server").stdout)
        open(self.path("empty"), "w").close()
        self.refused(["chat", "--url", self.url, "--api-key-file", self.path("empty")], "empty holds no key")

    def test_a_terminal(self):
        leader, follower = pty.openpty()
        process = subprocess.Popen([support.BINARY, "chat", "--url", self.url], stdin=follower, stdout=follower, stderr=follower)
        os.close(follower)
        shown = ""

        def until(text):
            nonlocal shown
            end = time.monotonic() + 30
            while text not in shown:
                self.assertLess(time.monotonic(), end, shown)
                shown += os.read(leader, 4096).decode()
            shown = shown[shown.index(text) + len(text):]

        def say(text):
            os.write(leader, text.encode() + b"\n")

        until("parrot at 127.0.0.1")
        say("hello")
        until("You said: hello \u00e9")
        until("3 tokens")
        say("refuse me")
        until("[no, I will not]")
        say("/undo")
        until("[taken back]")
        say("/what")
        until("[there is no command /what; /help lists them]")
        say("/set temperature warm")
        until("[/set takes temperature")
        say("/quit")
        self.assertEqual(process.wait(30), 0)
        os.close(leader)

    def test_load_on_a_server(self):
        flags = ["bench", "serve", "--url", self.url, "--num-requests", "6", "--num-warmup", "1", "--concurrency", "2", "--prompt-tokens", "7",
                 "--output-tokens", "4"]
        summary = json.loads(self.output(*flags, "--json"))
        self.assertEqual((summary["completed"], summary["failed"], summary["prompt_tokens"], summary["output_tokens"]), (6, 0, 42, 24))
        self.assertEqual(len(Api.bodies), 7)
        self.assertIn("6 completed, 0 failed", self.output(*flags))
        Api.key = "another"
        self.refused(flags, "the server asks for an API key", "hint: --api-key-file")

    def test_what_is_asked_wrongly(self):
        for command in (["chat"], ["bench", "serve"]):
            self.refused(command, "one of --url and --load is required", "hint: --url http://127.0.0.1:8000 asks a server")
            self.refused([*command, "--url", self.url, "--load", "x"], "--url and --load are both given")
        self.refused(["chat", "--url", "ftp://x"], "ftp://x")
        self.refused(["chat", "--url", "http://127.0.0.1:1"], "cannot connect to 127.0.0.1:1")
        self.refused(["bench", "serve", "--url", self.url, "--prompt-tokens", "2", "--prefix-tokens", "3", "--request-rate", "-1"],
                     "--prefix-tokens 3 is above --prompt-tokens 2", "--request-rate -1 is negative")


if __name__ == "__main__":
    support.main()
