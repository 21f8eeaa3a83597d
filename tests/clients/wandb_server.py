"""A stand-in for the server of Weights & Biases on the loopback: keeps what `wandb sync` uploads, run by run."""
import gzip
import http.server
import json
import threading


class Run:
    def __init__(self, name):
        self.name = name
        self.upserts = []   # variables of the mutations that described the run
        self.files = {}     # name of a stream (wandb-history.jsonl) -> its lines, by place
        self.final = {}     # what the last message of the stream said (complete, exitcode)

    def lines(self, stream):
        content = self.files.get(stream, {})
        return [json.loads(content[i]) for i in sorted(content)]

    def config(self):
        config = {}
        for variables in self.upserts:
            if variables.get("config"):
                config.update(json.loads(variables["config"]))
        return {key: item.get("value") for key, item in config.items()}


class Server:
    """with Server() as server: server.url, server.runs, server.queries"""

    def __init__(self):
        self.runs, self.queries, self.unknown = {}, [], []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def body(self):
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

            def reply(self, content):
                data = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.reply({})

            def do_PUT(self):
                self.body()
                self.reply({})

            def do_POST(self):
                data = self.body()
                if self.path.startswith("/graphql"):
                    self.reply({"data": outer.answer(json.loads(data))})
                elif self.path.endswith("/file_stream"):
                    outer.stream(self.path.split("/")[-2], json.loads(data))
                    self.reply({"exitcode": None, "limits": {}})
                else:
                    self.reply({})

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.handle_error = lambda *_: None  # clients may hang up
        self.url = "http://127.0.0.1:%d" % self.http.server_address[1]

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def run(self, name):
        return self.runs.setdefault(name, Run(name))

    def stream(self, name, message):
        run = self.run(name)
        for file, part in (message.get("files") or {}).items():
            lines = run.files.setdefault(file, {})
            for i, line in enumerate(part.get("content") or []):
                lines[part.get("offset", 0) + i] = line
        if message.get("complete") is not None:
            run.final = message

    def answer(self, request):
        query, variables = request.get("query", ""), request.get("variables") or {}
        self.queries.append(request)
        project = {"id": "p", "name": variables.get("project") or variables.get("model") or "p",
                   "entity": {"id": "e", "name": variables.get("entity") or "us"}}
        if "upsertBucket" in query:
            run = self.run(variables.get("name") or "unnamed")
            run.upserts.append(variables)
            bucket = {"id": "id-" + run.name, "name": run.name, "displayName": variables.get("displayName") or run.name,
                      "description": None, "config": variables.get("config") or "{}", "sweepName": None, "project": project,
                      "historyLineCount": len(run.files.get("wandb-history.jsonl", {}))}
            return {"upsertBucket": {"bucket": bucket, "inserted": len(run.upserts) == 1}}
        if "bucket(" in query:
            run = self.runs.get(variables.get("name") or variables.get("run"))
            if run is None or not run.upserts:
                return {"model": {"id": "p", "bucket": None}}
            history = run.files.get("wandb-history.jsonl", {})
            tail = [history[i] for i in sorted(history)[-1:]]
            return {"model": {"id": "p", "bucket": {
                "id": "id-" + run.name, "name": run.name, "config": json.dumps(
                    {key: {"value": value} for key, value in run.config().items()}),
                "summaryMetrics": json.dumps((run.lines("wandb-summary.json") or [{}])[-1]), "displayName": run.name,
                "historyTail": json.dumps(tail), "eventsTail": "[]", "historyLineCount": len(history), "eventsLineCount": 0,
                "logLineCount": 0, "tags": [], "wandbConfig": "{}", "stopped": False,
                "files": {"edges": []}}}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": [
                {"name": name, "uploadUrl": self.url + "/upload"} for name in variables.get("files", [])]}}
        if "viewer" in query or "serverInfo" in query:
            return {"viewer": {"id": "v", "entity": "us", "username": "us", "flags": "{}", "email": "us@localhost", "teams": {"edges": []}},
                    "serverInfo": {"cliVersionInfo": {"max_cli_version": "9.9.9", "min_cli_version": "0.0.1"},
                                   "latestLocalVersionInfo": None, "features": []}}
        self.unknown.append(query)
        return {}
