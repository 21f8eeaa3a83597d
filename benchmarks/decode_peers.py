"""Prompts and tokens per second of a Llama of 160 M parameters in fp32 or 8 bits on the CPU, next to transformers' eager generation, llama.cpp and
CTranslate2.

    python benchmarks/decode_peers.py build/dev/bin/bench_decode [--threads 2] [--rounds 7] [--int8] [--llama-python PYTHON]

Weights are random, written once as a Hugging Face folder (transformers makes it). Programs take turns in one run, so that what else the
machine does hits them alike; the medians of the rounds are compared, as ratios. With --llama-python, an interpreter that has
llama_cpp (llama-cpp-python, built natively) and gguf, the same weights go to llama.cpp in F32, with --ctranslate2 in fp32 to that package. With --int8 ours
are in 8 bits (--int8 of the program), theirs in Q8_0 and int8_float32, and transformers takes no part. Needs torch and transformers.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

# prompt tokens, generated tokens, sequences
CASES = {"prompt of 512": (512, 1, 1), "128 tokens after 128": (128, 128, 1), "128 tokens after 128, 8 sequences": (128, 128, 8)}
PREFILL = {"prompt of 512"}


def make_model(folder):
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=32000, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                                      num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=2048)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


class Ours:
    def __init__(self, program, folder, threads, int8=False):
        env = dict(os.environ, OMP_NUM_THREADS=str(threads))
        self.process = subprocess.Popen([program, str(folder), str(threads), *(["int8"] if int8 else [])], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=env)

    def run(self, prompt, tokens, sequences):
        self.process.stdin.write(f"{prompt} {tokens} {sequences}\n")
        self.process.stdin.flush()
        return [float(x) for x in self.process.stdout.readline().split()]


class Transformers:
    def __init__(self, folder, threads):
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()

    def run(self, prompt, tokens, sequences):
        torch = self.torch
        ids = torch.randint(0, 32000, (sequences, prompt), generator=torch.Generator().manual_seed(1))
        marks = []

        class Marks:
            def put(self, value):
                marks.append(time.perf_counter())

            def end(self):
                pass

        streamer = Marks() if sequences == 1 else None
        with torch.inference_mode():
            begin = time.perf_counter()
            if streamer is None:
                self.model.generate(ids, max_new_tokens=1, min_new_tokens=1, do_sample=False, pad_token_id=0)
                first = time.perf_counter() - begin
                begin = time.perf_counter()
            self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                                pad_token_id=0, streamer=streamer)
            end = time.perf_counter()
        if streamer is None:
            return [first, end - begin - first]
        return [marks[1] - begin, end - marks[1]]  # the first mark is the prompt itself


class LlamaCpp:
    CODE = """
import sys, time, numpy, ctypes, llama_cpp as l
path, threads = sys.argv[1], int(sys.argv[2])
l.llama_backend_init()
params = l.llama_model_default_params(); params.n_gpu_layers = 0
params.use_extra_bufts = False  # weights repacked for AMX end in an illegal instruction (0.3.36, a virtual machine)
model = l.llama_model_load_from_file(path.encode(), params)
for line in sys.stdin:
    prompt, tokens, sequences = map(int, line.split())
    c = l.llama_context_default_params()
    c.n_ctx = (prompt + tokens) * sequences + 64; c.n_batch = c.n_ubatch = prompt * sequences
    c.n_seq_max = sequences; c.n_threads = c.n_threads_batch = threads; c.type_k = c.type_v = 0
    context = l.llama_init_from_model(model, c)
    batch = l.llama_batch_init(prompt * sequences, 0, 1)
    def decode(rows):  # (id, position, sequence, wanted)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token; batch.pos[i] = position; batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence; batch.logits[i] = wanted
        if l.llama_decode(context, batch): raise SystemExit("llama_decode failed")
        found = []
        for i, row in enumerate(rows):
            if row[3]:
                pointer = l.llama_get_logits_ith(context, i)
                found.append(int(numpy.ctypeslib.as_array(pointer, shape=(32000,)).argmax()))
        return found
    rng = numpy.random.default_rng(1)
    begin = time.perf_counter()
    ids = decode([(int(rng.integers(0, 32000)), i, s, i == prompt - 1) for s in range(sequences) for i in range(prompt)])
    middle = time.perf_counter()
    for t in range(1, tokens):
        ids = decode([(ids[s], prompt + t - 1, s, True) for s in range(sequences)])
    print(middle - begin, time.perf_counter() - middle, flush=True)
    l.llama_batch_free(batch); l.llama_free(context)
"""

    def __init__(self, python, folder, threads, int8=False):
        path = folder / ("model-q8_0.gguf" if int8 else "model.gguf")
        if not path.exists():
            write_gguf(python, folder, path, "Q8_0" if int8 else "F32")
        self.process = subprocess.Popen([python, "-c", self.CODE, str(path), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)

    run = Ours.run


class CTranslate2:
    def __init__(self, folder, threads, int8=False):
        import ctranslate2
        target = folder / "ctranslate2"
        if not target.exists():
            write_tokenizer(folder)
            ctranslate2.converters.TransformersConverter(str(folder)).convert(str(target))
        self.generator = ctranslate2.Generator(str(target), device="cpu", intra_threads=threads,
                                               compute_type="int8_float32" if int8 else "float32")

    def run(self, prompt, tokens, sequences):
        ids = [[f"t{(31 * i + 7 * s) % 32000}" for i in range(prompt)] for s in range(sequences)]

        def seconds(count):
            begin = time.perf_counter()
            results = self.generator.generate_batch(ids, max_length=count, min_length=count, include_prompt_in_result=False, sampling_topk=1)
            assert all(len(result.sequences_ids[0]) == count for result in results)
            return time.perf_counter() - begin

        first = seconds(1)
        return [first, seconds(tokens) - first]


def write_tokenizer(folder):
    import tokenizers
    import transformers
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(32000)}, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2").save_pretrained(folder)


GGUF = """
import json, sys, numpy, gguf, safetensors.numpy
folder, path, kind = sys.argv[1:]
config = json.load(open(folder + "/config.json"))
w = gguf.GGUFWriter(path, "llama")
heads, size = config["num_attention_heads"], config["hidden_size"]
w.add_context_length(2048); w.add_embedding_length(size); w.add_block_count(config["num_hidden_layers"])
w.add_feed_forward_length(config["intermediate_size"]); w.add_head_count(heads); w.add_head_count_kv(config["num_key_value_heads"])
w.add_rope_dimension_count(size // heads); w.add_layer_norm_rms_eps(config["rms_norm_eps"]); w.add_rope_freq_base(10000.0)
w.add_vocab_size(32000); w.add_tokenizer_model("llama")
w.add_token_list([b"t%d" % i for i in range(32000)]); w.add_token_scores([0.0] * 32000); w.add_token_types([1] * 32000)
t = safetensors.numpy.load_file(folder + "/model.safetensors")
def rotated(x):  # halves to pairs
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
def add(name, x):
    type = gguf.GGMLQuantizationType[kind if x.ndim == 2 else "F32"]
    w.add_tensor(name, x if type.name == "F32" else gguf.quants.quantize(x, type), raw_dtype=type)
names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}
add("token_embd.weight", t["model.embed_tokens.weight"]); add("output_norm.weight", t["model.norm.weight"])
add("output.weight", t["lm_head.weight"])
for i in range(config["num_hidden_layers"]):
    for theirs, name in names.items():
        x = t[f"model.layers.{i}.{theirs}.weight"]
        add(f"blk.{i}.{name}.weight", rotated(x) if name in ("attn_q", "attn_k") else x)
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
"""


def write_gguf(python, folder, path, kind):
    subprocess.run([python, "-c", GGUF, str(folder), str(path), kind], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--llama-python")
    parser.add_argument("--ctranslate2", action="store_true")
    parser.add_argument("--model", help="where the weights are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(args.model or temporary)
        if not (folder / "config.json").exists():
            make_model(folder)
        programs = {"megatron": Ours(args.program, folder, args.threads, args.int8)}
        if not args.int8:
            programs["transformers"] = Transformers(folder, args.threads)
        if args.llama_python:
            programs["llama.cpp"] = LlamaCpp(args.llama_python, folder, args.threads, args.int8)
        if args.ctranslate2:
            programs["CTranslate2"] = CTranslate2(folder, args.threads, args.int8)
        for case, (prompt, tokens, sequences) in CASES.items():
            times = {name: [] for name in programs}
            for round_number in range(args.rounds + 1):
                for name, program in programs.items():
                    both = program.run(prompt, tokens, sequences)
                    if round_number > 0:  # the first one loads code and fills caches
                        times[name].append(both[0] if case in PREFILL else both[1])
            medians = {name: statistics.median(t) for name, t in times.items()}
            row = {"case": case} | {f"over {name}": round(t / medians["megatron"], 3) for name, t in medians.items() if name != "megatron"}
            row["spread"] = {name: round(max(t) / min(t), 2) for name, t in times.items()}
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
