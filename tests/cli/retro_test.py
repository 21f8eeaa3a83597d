#!/usr/bin/env python3
"""`megatron retro`: a project at once, step by step, and killed at random moments has the same files; neighbours are the nearest vectors
of other documents; what a sample looked up is shown; what is refused.

Usage: retro_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import struct
import subprocess
import time

import support

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "golden"
EMBEDDER = str(GOLDENS / "encoders" / "sentence")
WORDS = "the cat sat on a mat dog ran far away and then rain fell over old hill town with river stone bridge light sun".split()


def read_npy(path):
    """(shape, numbers)"""
    data = pathlib.Path(path).read_bytes()
    begin = 10 + struct.unpack("<H", data[8:10])[0]
    header = eval(data[10:begin].decode(), {})  # a dictionary of literals, as NumPy writes it
    kind = {"<i4": "i", "<u4": "I", "<f4": "f"}[header["descr"]]
    return header["shape"], struct.unpack(f"<{(len(data) - begin) // 4}{kind}", data[begin:])


class RetroTest(support.FolderTest):
    def setUp(self):
        super().setUp()
        draw = random.Random(1)
        with open(self.path("t.jsonl"), "w", encoding="utf-8") as stream:
            for _ in range(40):
                stream.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(5, 40)))}) + "\n")
        support.call("preprocess-data", "--input", self.path("t.jsonl"), "--output-prefix", self.path("t"), "--tokenizer-type", "ByteLevelTokenizer",
                     "--append-eod")

    MODEL = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--max-position-embeddings", "64", "--lr", "1e-2",
             "--log-interval", "1"]

    def samples(self):
        return ["--seq-length", "64", "--tokenizer-type", "ByteLevelTokenizer", "--data-path", self.path("t_text_document"), "--split", "90,10,0",
                "--train-iters", "5", "--global-batch-size", "4", "--micro-batch-size", "2", "--eval-iters", "1", "--device", "cpu"]

    def project(self, name):
        return ["--retro-project-dir", self.path(name), "--retro-chunk-length", "16"]

    def flags(self, project, *more):
        return ["retro", *self.project(project), "--retro-embedder", EMBEDDER, *self.samples(), "--retro-block-size", "50",
                "--retro-query-num-neighbors-query", "30", "--retro-query-num-neighbors-save", "4", *more]

    def files(self, project):
        root = pathlib.Path(self.path(project))
        return {str(f.relative_to(root)): f.read_bytes() for f in sorted(root.rglob("*")) if f.is_file() and ".tmp-" not in f.name}

    def test_a_project_at_once_by_steps_and_after_kills(self):
        begin = time.monotonic()
        self.run_ok(*self.flags("once"))
        took = time.monotonic() - begin
        expected = self.files("once")
        self.assertEqual(len([f for f in expected if f.startswith("embeddings/")]), 5)
        self.run_ok(*self.flags("steps", "--retro-tasks", "db-build"))
        self.run_ok(*self.flags("steps", "--retro-tasks", "index-train,index-add"))
        self.run_ok(*self.flags("steps", "--retro-tasks", "query-neighbors"))
        self.assertEqual(self.files("steps"), expected)
        self.assertIn("index-add is done already", self.run_ok(*self.flags("steps")).stderr)

        draw, killed = random.Random(2), 0
        for _ in range(40):  # the first three cannot have come to the end
            process = subprocess.Popen([support.BINARY, *self.flags("kills")], stderr=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))
            time.sleep(took * draw.uniform(0.1, 0.3))
            process.kill()
            killed += process.wait() < 0
            if len(self.files("kills")) == len(expected):
                break
        self.run_ok(*self.flags("kills"))
        self.assertEqual(self.files("kills"), expected)
        self.assertGreater(killed, 2)

    def test_commands_run_as_written(self):
        page = (GOLDENS.parents[1] / "docs" / "retro.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        block = lambda kind: "".join(text for name, text in blocks if name == kind)
        commands = [shlex.split(line)[1:] for line in re.sub(r"\\\n\s*", " ", block("")).splitlines() if line.startswith("megatron ")]
        self.assertGreaterEqual({command[0] for command in commands},
                                {"train-tokenizer", "preprocess-data", "retro", "check", "pretrain", "evaluate", "generate"}, commands)
        os.symlink(EMBEDDER, self.path("encoder"))
        pathlib.Path(self.path("run.yaml")).write_text(block("yaml"), encoding="utf-8")
        pathlib.Path(self.path("neighbours.jsonl")).write_text(block("json"), encoding="utf-8")
        draw = random.Random(1)
        for name, count in (("text", 60), ("held_out", 3)):
            lines = (json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(20, 80)))}) + "\n" for _ in range(count))
            pathlib.Path(self.path(name + ".jsonl")).write_text("".join(lines), encoding="utf-8")
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.folder)
        for command in commands:
            with self.subTest(command=command):
                self.run_ok(*command)

    def test_vectors_depend_on_no_threads_and_batches(self):
        make = ["--retro-tasks", "db-build,index-train,index-add", "--num-threads"]
        self.run_ok(*self.flags("one", *make, "1"))
        self.run_ok(*self.flags("many", *make, "16", "--retro-embedder-batch-tokens", "100"))
        self.assertEqual(self.files("many"), self.files("one"))

    def test_neighbours_are_the_nearest_of_other_documents(self):
        self.run_ok(*self.flags("p"))
        root = pathlib.Path(self.path("p"))
        (chunks, _), rows = read_npy(root / "db" / "chunks.npy")
        vectors = []
        for block in sorted((root / "embeddings").iterdir()):
            (count, width), numbers = read_npy(block)
            vectors += [numbers[i * width:(i + 1) * width] for i in range(count)]
        self.assertEqual(len(vectors), chunks)
        query, = (root / "query").glob("train-*")
        self.assertEqual(json.loads((query / "description.json").read_text())["num_samples"], 20)
        out = self.output(*self.flags("p", "--show", "train:3")).splitlines()
        shown = [(int(line.split()[1].rstrip(",")), float(line.split()[-1])) for line in out if line.startswith("  neighbour")]
        texts = [line.split(": ", 1)[1] for line in out if line.startswith("chunk")]
        self.assertEqual((len(texts), len(shown)), (4, 16))
        pathlib.Path(self.path("q.txt")).write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        asked = [json.loads(line)["embedding"] for line in
                 self.output("embed", EMBEDDER, "--input", self.path("q.txt"), "--pooling", "mean", "--device", "cpu").splitlines()]
        _, stored = read_npy(query / "000000000000-000000000050.npy")
        for u in range(4):
            distances = [sum((a - b) ** 2 for a, b in zip(asked[u], v)) for v in vectors]
            ids = stored[(12 + u) * 4:(13 + u) * 4]
            self.assertEqual([i for i, _ in shown[u * 4:u * 4 + 4]], list(ids))
            for (number, far) in shown[u * 4:u * 4 + 4]:
                self.assertAlmostEqual(far, distances[number], delta=2e-4)
            own = {d for d in range(40) if all(r[1] != d for r in (rows[i * 5:i * 5 + 5] for i in ids))}
            nearer = [i for i in range(chunks) if distances[i] < distances[ids[-1]] - 1e-6 and i not in ids]
            self.assertTrue(all(rows[i * 5 + 1] in own for i in nearer))
            self.assertEqual(list(ids), sorted(ids, key=lambda i: (round(distances[i], 6), i)))

    def train(self, project, *more):
        return ["pretrain", "--task", "retro", *self.project(project), *self.samples(), *self.MODEL, "--retro-layers", "1", "2", *more]

    def losses(self, folder):
        lines = [json.loads(line) for line in pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()]
        return [line["lm loss"] for line in lines if line["type"] == "train"]

    def test_a_model_trains_with_neighbours_and_goes_on(self):
        self.run_ok(*self.flags("p"))
        self.run_ok(*self.train("p", "--save", self.path("run"), "--save-interval", "3"))
        whole = self.losses(self.path("run"))
        self.assertEqual(len(whole), 5)
        self.assertLess(whole[-1], whole[0])
        self.run_ok(*self.train("p", "--save", self.path("half"), "--exit-interval", "3"))
        self.run_ok(*self.train("p", "--save", self.path("half"), "--load", self.path("half")))
        self.assertEqual(self.losses(self.path("half")), whole)
        self.assert_error(1, f'{self.path("p")} has no neighbours of these train samples', *self.train("p", "--train-iters", "6"))
        self.assert_error(1, "--retro-num-neighbors is 5, of each chunk 4 were saved", *self.train("p", "--retro-num-neighbors", "5"))
        self.assert_error(1, f'{self.path("none")}: the step db-build is not done', *self.train("none"))

    def test_check_and_a_gpt_that_learns_to_read_neighbours(self):
        self.run_ok(*self.flags("p"))
        self.assertIn("every rule holds", self.output("check", *self.train("p")[1:], "--world-size", "4", "--pipeline-model-parallel-size", "2"))
        self.run_ok("pretrain", *self.samples(), *self.MODEL, "--save", self.path("gpt"))
        self.assert_error(1, f'{self.path("gpt")}/iter_0000005 was trained for the task gpt, this run is for retro',
                          *self.train("p", "--load", self.path("gpt")))
        new = ["--finetune", "--load", self.path("gpt"), "--freeze-except", "decoder.layers.*.cross_attention", "decoder.layers.*.pre_cross_attn_layernorm"]
        self.run_ok(*self.train("p", *new, "--save", self.path("retro")))
        before, after = self.tensors(self.path("gpt")), self.tensors(self.path("retro"))
        self.assertEqual(set(after) - set(before), {name for name in after if "cross_att" in name})
        self.assertGreater(len(after), len(before))
        self.assertEqual({name: after[name] for name in before}, before)
        self.assertLess(self.losses(self.path("retro"))[-1], self.losses(self.path("gpt"))[0])

    def tensors(self, folder):
        """The weights of the only checkpoint."""
        file, = pathlib.Path(folder).glob("iter_*/rank_00000.safetensors")
        return {name: tensor for name, tensor in support.read_safetensors(file).items() if not name.startswith("optimizer")}

    def retrieved(self, project, texts):
        """Of each text, the nearest chunk of the database and what follows it, as text."""
        root = pathlib.Path(self.path(project))
        (chunks, _), rows = read_npy(root / "db" / "chunks.npy")
        documents = [json.loads(line)["text"] for line in pathlib.Path(self.path("t.jsonl")).read_text().splitlines()]
        vectors = []
        for block in sorted((root / "embeddings").iterdir()):
            (count, width), numbers = read_npy(block)
            vectors += [numbers[i * width:(i + 1) * width] for i in range(count)]
        pathlib.Path(self.path("q.txt")).write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        found = []
        for line in self.output("embed", EMBEDDER, "--input", self.path("q.txt"), "--pooling", "mean", "--device", "cpu").splitlines():
            asked = json.loads(line)["embedding"]
            order = sorted(range(chunks), key=lambda i: sum((a - b) ** 2 for a, b in zip(asked, vectors[i])))
            found.append([documents[rows[i * 5 + 1]][rows[i * 5 + 2]:rows[i * 5 + 2] + 32] for i in order[:2]])
        return found

    def test_texts_are_continued_and_scored_with_neighbours(self):
        self.run_ok(*self.flags("p"))
        self.run_ok(*self.train("p", "--save", self.path("run"), "--init-method-std", "0.5"))
        self.assert_error(1, f'{self.path("run")}: a model of type Retro is not served: each chunk of its texts reads neighbours '
                          "that are looked up before it goes on, and a server looks nothing up between the steps of its requests",
                          "serve", "--load", self.path("run"), "--device", "cpu", "--port", "0")
        lookup = ["--retro-project-dir", self.path("p"), "--retro-embedder", EMBEDDER, "--data-path", self.path("t_text_document"), "--device", "cpu"]
        prompt = "the cat sat on a mat dog ran far"  # two chunks; 15 tokens complete no other one
        write = ["generate", self.path("run"), "--prompt", prompt, "--tokens-to-generate", "15", "--seed", "3", "--ignore-eod", "--json"]
        tokens = lambda *more: json.loads(self.output(*write, *more))[0]["tokens"]
        found = tokens(*lookup)
        pathlib.Path(self.path("n.jsonl")).write_text(json.dumps(self.retrieved("p", [prompt[:16], prompt[16:]])) + "\n", encoding="utf-8")
        given = ["--neighbors", self.path("n.jsonl"), "--device", "cpu"]
        self.assertEqual(tokens(*given), found)
        self.assertNotEqual(tokens("--device", "cpu"), found)
        scored = ["evaluate", self.path("run"), "--tasks", f'perplexity={self.path("t.jsonl")}', "--max-length", "64", "--json"]
        perplexity = lambda *more: json.loads(self.output(*scored, *more))["results"][0]["token_perplexity"]
        self.assertNotAlmostEqual(perplexity(*lookup), perplexity("--device", "cpu"), places=6)
        self.assert_error(2, "--neighbors and --retro-project-dir are both given", *write, *lookup, *given[:2])
        self.assert_error(1, f'{self.path("n.jsonl")} has 1 lines, none for text 2', *write[:4], "more", *write[4:], *given)
        pathlib.Path(self.path("u.jsonl")).write_text('{"text": "another"}\n')
        support.call("preprocess-data", "--input", self.path("u.jsonl"), "--output-prefix", self.path("u"), "--tokenizer-type", "ByteLevelTokenizer")
        self.assert_error(1, f'--data-path {self.path("u_text_document")} is not the data of the project, "t_text_document"',
                          *write, *[flag.replace("t_text", "u_text") for flag in lookup])

    def test_an_index_of_faiss_finds_the_same_in_all_lists(self):
        more = ["--retro-index-str", "IVF4,Flat", "--retro-index-ntrain", "150"]
        if not pathlib.Path(support.BINARY).parents[1].joinpath("lib", "libmegatron_faiss.so").exists():
            return self.assert_error(1, "indices other than Flat need libmegatron_faiss.so, which was not built or cannot be loaded",
                                     *self.flags("p", *more))
        self.run_ok(*self.flags("p"))
        self.run_ok(*self.flags("lists", *more))
        self.run_ok(*self.flags("one", *more, "--retro-query-nprobe", "1"))
        found = lambda project: [f for name, f in self.files(project).items() if "/train-" in name and name.endswith(".npy")]
        self.assertEqual(found("lists"), found("p"))
        self.assertNotEqual(found("one"), found("p"))
        prompt = ["generate", self.path("run"), "--prompt", "the cat sat on a mat dog ran far", "--tokens-to-generate", "5", "--ignore-eod", "--greedy",
                  "--retro-embedder", EMBEDDER, "--data-path", self.path("t_text_document"), "--device", "cpu", "--retro-project-dir"]
        self.run_ok(*self.train("p", "--save", self.path("run"), "--init-method-std", "0.5"))
        self.assertEqual(self.output(*prompt, self.path("lists")), self.output(*prompt, self.path("p")))

    def kill_steps(self, kills, before, steps, *more):
        """Kills each of the steps that many times, which begins anew each time after those before. How many kills hit it."""
        more, hits = [*more, "--retro-tasks"], 0
        os.makedirs(self.path("whole"))
        for step in before:
            self.run_ok(*self.flags("whole", *more, step))
        draw = random.Random(3)
        for step, file in steps:
            shutil.copytree(self.path("whole"), self.path("before"))
            begin = time.monotonic()
            self.run_ok(*self.flags("whole", *more, step))
            took, expected, moments = time.monotonic() - begin, self.files("whole"), []
            self.assertTrue(any(file in name for name in expected), expected.keys())
            for _ in range(kills):
                shutil.copytree(self.path("before"), self.path("killed"))
                process = subprocess.Popen([support.BINARY, *self.flags("killed", *more, step)], stderr=subprocess.DEVNULL)
                moments.append(draw.uniform(0.1, 0.9))
                time.sleep(took * moments[-1])
                process.kill()
                hits += process.wait() < 0
                self.run_ok(*self.flags("killed", *more, step))
                self.assertEqual(self.files("killed"), expected, (step, moments))
                shutil.rmtree(self.path("killed"))
            shutil.rmtree(self.path("before"))
        return hits

    # MEGATRON_RETRO_KILLS: how many kills of each step.
    def test_each_step_after_kills(self):
        kills = int(os.environ.get("MEGATRON_RETRO_KILLS", "1"))
        hits = self.kill_steps(kills, [], (("db-build", "db/chunks.npy"), ("index-train", "manifest"), ("index-add", "embeddings/"),
                                           ("query-neighbors", "query/")))
        print(f"{hits} of {4 * kills} kills hit the steps of Flat")

    def test_an_index_of_faiss_after_kills(self):
        if not pathlib.Path(support.BINARY).parents[1].joinpath("lib", "libmegatron_faiss.so").exists():
            self.skipTest("no libmegatron_faiss.so")
        self.kill_steps(int(os.environ.get("MEGATRON_RETRO_KILLS", "2")), ["db-build"],
                        (("index-train", "/trained"), ("index-add", "/added")), "--retro-index-str", "PCA8,IVF4_HNSW4,SQ8", "--retro-index-ntrain", "150")

    def test_what_is_refused(self):
        self.run_ok(*self.flags("p", "--retro-tasks", "db-build,index-train"))
        hint = f'{self.path("p")}/manifest.json: the project is of another run: '
        self.assert_error(1, hint + "chunk_length is 16, here 32", *self.flags("p", "--retro-chunk-length", "32"))
        self.assert_error(1, hint + "seed is 1234, here 7", *self.flags("p", "--seed", "7"))
        self.assert_error(1, hint + "data_sets[0].last_document is 36, here 20", *self.flags("p", "--split", "50,50,0"))
        self.assert_error(1, f'{self.path("p")}: the step index-add is not done', *self.flags("p", "--retro-tasks", "query-neighbors"))
        self.assert_error(2, "--retro-tasks add is unknown", *self.flags("p", "--retro-tasks", "add"))
        self.assert_error(2, "--seq-length 64 is no multiple of --retro-chunk-length 24", *self.flags("p", "--retro-chunk-length", "24"))
        self.assert_error(1, f'{self.path("p")}/manifest.json: the index is "Flat", here "IVF16,Flat"',
                          *self.flags("p", "--retro-tasks", "index-train", "--retro-index-str", "IVF16,Flat"))
        self.assert_error(2, "--show train names no sample", *self.flags("p", "--show", "train"))


if __name__ == "__main__":
    support.main()
