"""Folders of models that read images, as far as data need them: configuration, image processor, tokenizer, chat template."""
import json
import os

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "multimodal")
SAME = os.path.join(GOLDEN, "same")


def write_media_model(folder, family):
    with open(os.path.join(GOLDEN, "expansions.json")) as file:
        facts = {row["family"]: row for row in json.load(file)}[family]
    os.makedirs(folder, exist_ok=True)
    files = {"config.json": json.dumps(facts["config"]), "preprocessor_config.json": json.dumps(facts["processor"]),
             "chat_template.jinja": facts["template"]}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        with open(os.path.join(GOLDEN, "tokenizer", name)) as file:
            files[name] = file.read()
    for name, text in files.items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
