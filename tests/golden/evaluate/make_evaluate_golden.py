#!/usr/bin/env python3
"""Makes the goldens of `megatron evaluate`: a tiny model with a tokenizer, and the scores that
lm-evaluation-harness gives it on the files in data/.

Usage: make_evaluate_golden.py     (in this folder; rewrites model/ and golden.json)

Ran with lm_eval 0.4.13, transformers 5.23.0, tokenizers 0.23.3, torch 2.11.0. Prompts and metrics are those of
the harness's own task files; only where the data comes from is replaced.
"""
import json
import os
import shutil
import tempfile

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(HERE, "data")
TASKS = os.path.join(os.path.dirname(lm_eval.__file__), "tasks")
MAX_LENGTH = 96
STRIDE = 40  # of the second perplexity


def make_model(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=["<|begin|>", "<|end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    lines = [line for name in sorted(os.listdir(DATA)) for line in open(os.path.join(DATA, name), encoding="utf-8")]
    tokenizer.train_from_iterator(lines, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>",
                            model_max_length=MAX_LENGTH).save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(vocab_size=390, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=MAX_LENGTH, initializer_range=0.2,
                         bos_token_id=0, eos_token_id=1)
    model = LlamaForCausalLM(config).float()
    train(model, tokenizer)
    model.save_pretrained(folder)


def train(model, tokenizer):
    """A few steps on some of the texts, so that the model is right now and then."""
    texts = [json.loads(line)["text"] for line in open(os.path.join(DATA, "lambada.jsonl"), encoding="utf-8")][:4]
    texts += [f"Answer: {letter}" for letter in "ABCC"]
    rows = [torch.tensor([tokenizer.encode(text).ids]) for text in texts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = sum(model(input_ids=row, labels=row).loss for row in rows) / len(rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def harness_task(folder, name, source, file, **changes):
    """One of the harness's task files, on a local file."""
    path = os.path.join(TASKS, source)
    with open(path) as stream:
        text = stream.read()
    base = {}
    if "_default_template_yaml" in text:
        with open(os.path.join(os.path.dirname(path), "_default_template_yaml")) as stream:
            base = yaml.load(stream.read().replace("!function ", ""), yaml.SafeLoader)
    functions = [line.split("!function ")[1] for line in text.splitlines() if "!function " in line]
    for module in {function.split(".")[0] for function in functions}:
        shutil.copy(os.path.join(os.path.dirname(path), module + ".py"), os.path.join(folder, name + "_" + module + ".py"))
    config = {**base, **yaml.load(text.replace("!function ", "FUNCTION "), yaml.SafeLoader)}
    for key in ("include", "tag", "dataset_name", "validation_split", "training_split", "fewshot_split", "task_alias"):
        config.pop(key, None)
    files = {"test": os.path.join(DATA, file) if not os.path.isabs(file) else file}
    config.update(task=name, dataset_path="json", test_split="test", **changes)
    if "shots" in changes:
        files["dev"] = os.path.join(DATA, config.pop("shots"))
        config["fewshot_split"] = "dev"
        config["fewshot_config"] = {"sampler": "first_n"}
    config["dataset_kwargs"] = {"data_files": files}
    out = yaml.safe_dump(config, allow_unicode=True)
    for function in functions:
        out = out.replace(f"FUNCTION {function}\n", f"!function {name}_{function}\n")
    with open(os.path.join(folder, name + ".yaml"), "w") as stream:
        stream.write(out)
    return name


def acc(*names):
    return [{"metric": n, "aggregation": "mean", "higher_is_better": True} for n in names]


def main():
    model = os.path.join(HERE, "model")
    shutil.rmtree(model, ignore_errors=True)
    make_model(model)
    with tempfile.TemporaryDirectory() as folder:
        race = os.path.join(folder, "race.jsonl")  # the harness has the problems as a Python literal
        with open(race, "w") as out:
            for line in open(os.path.join(DATA, "race.jsonl")):
                doc = json.loads(line)
                out.write(json.dumps({"article": doc["article"], "problems": repr(doc["problems"])}) + "\n")
        three = {"metric_list": acc("acc", "acc_norm", "acc_bytes")}
        subject = "The following are multiple choice questions (with answers) about {{subject|replace('_', ' ')}}.\n\n"
        names = [
            harness_task(folder, "hellaswag_file", "hellaswag/hellaswag.yaml", "hellaswag.jsonl", **three),
            harness_task(folder, "arc_file", "arc/arc_easy.yaml", "arc.jsonl", **three),
            harness_task(folder, "arc_shots_file", "arc/arc_easy.yaml", "arc.jsonl", shots="arc_train.jsonl", num_fewshot=2, **three),
            harness_task(folder, "piqa_file", "piqa/piqa.yaml", "piqa.jsonl", **three),
            harness_task(folder, "mmlu_file", "mmlu/default/mmlu_anatomy.yaml", "mmlu.jsonl", description=subject),
            harness_task(folder, "race_file", "race/race.yaml", race, **three),
            harness_task(folder, "lambada_file", "lambada/lambada_openai.yaml", "lambada.jsonl"),
            harness_task(folder, "perplexity_file", "wikitext/wikitext.yaml", "documents.jsonl", doc_to_target="{{page}}",
                         process_results="FUNCTION preprocess_wikitext.process_results"),
        ]
        lm = HFLM(pretrained=model, device="cpu", dtype="float32", batch_size=4, add_bos_token=False, max_length=MAX_LENGTH)
        results = lm_eval.simple_evaluate(model=lm, tasks=names, task_manager=TaskManager(include_path=folder), log_samples=True,
                                          bootstrap_iters=0)
        golden = {}
        for name in names:
            samples = sorted(results["samples"][name], key=lambda s: s["doc_id"])
            entry = {"metrics": {k.removesuffix(",none"): v for k, v in results["results"][name].items()
                                 if k.endswith(",none") and isinstance(v, float)}, "samples": []}
            for sample in samples:
                answers = [r[0] if isinstance(r[0], (list, tuple)) else r for r in sample["resps"]]
                contexts = [a[0] for a in sample["arguments"]]
                entry["samples"].append({"context": contexts[0] if name != "perplexity_file" else "",
                                         "logprobs": [float(a[0]) for a in answers],
                                         "greedy": [a[1] in (True, "True") for a in answers if len(a) > 1]})
            golden[name.removesuffix("_file")] = entry
        golden["perplexity_stride"] = {"logprobs": rolling(lm, STRIDE), "stride": STRIDE}
        golden["max_length"] = MAX_LENGTH
    with open(os.path.join(HERE, "golden.json"), "w") as out:
        json.dump(golden, out, indent=1, ensure_ascii=False)
        out.write("\n")


def rolling(lm, stride):
    """Log-likelihoods of the documents in windows that overlap, by the harness's own functions."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    out = []
    for line in open(os.path.join(DATA, "documents.jsonl"), encoding="utf-8"):
        windows = get_rolling_token_windows(lm.tok_encode(json.loads(line)["page"]), lm.prefix_token_id, MAX_LENGTH, MAX_LENGTH - stride + 1)
        parts = lm._loglikelihood_tokens([(None, *make_disjoint_window(w)) for w in windows], disable_tqdm=True)
        out.append(sum(p[0] for p in parts))
    return out


if __name__ == "__main__":
    main()
