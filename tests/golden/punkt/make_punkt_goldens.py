"""Writes the goldens of sentence splitting: python make_punkt_goldens.py (nltk 3.9.1)

text.json is a list of texts. english/ holds the parameters that NLTK learns from them, in the files of its punkt_tab; sentences.json
for each text its sentences, those with --keep-newlines, and those without parameters.
"""
import json
import os

import nltk.tokenize.punkt as punkt

HERE = os.path.dirname(os.path.abspath(__file__))


class KeepNewlines(punkt.PunktLanguageVars):
    """White space behind a sentence belongs to it: what Megatron-LM's preprocess_data.py asks of NLTK with --keep-newlines."""

    _period_context_fmt = r"""
        \S*
        %(SentEndChars)s
        \s*
        (?=(?P<after_tok>
            %(NonWord)s
            |
            (?P<next_tok>\S+)
        ))"""


def learn(texts, folder):
    """Learns parameters, writes them sorted, and reads them back."""
    trainer = punkt.PunktTrainer()
    trainer.INCLUDE_ALL_COLLOCS = True
    trainer.train("\n\n".join(texts))
    punkt.save_punkt_params(trainer.get_params(), dir=folder)
    for name in os.listdir(folder):
        with open(f"{folder}/{name}", encoding="utf-8", newline="") as file:
            lines = sorted(file.read().split("\n"))
        with open(f"{folder}/{name}", "w", encoding="utf-8", newline="") as file:
            file.write("\n".join(lines))
    return punkt.load_punkt_params(folder)


def main():
    with open(f"{HERE}/text.json", encoding="utf-8") as file:
        texts = json.load(file)
    learned = learn(texts, f"{HERE}/english")
    splitters = {
        "sentences": punkt.PunktSentenceTokenizer(learned),
        "keep_newlines": punkt.PunktSentenceTokenizer(learned, lang_vars=KeepNewlines()),
        "no_parameters": punkt.PunktSentenceTokenizer(),
    }
    result = [{key: splitter.tokenize(text) for key, splitter in splitters.items()} for text in texts]
    with open(f"{HERE}/sentences.json", "w", encoding="utf-8") as file:
        json.dump(result, file, ensure_ascii=False, indent=0)
        file.write("\n")


if __name__ == "__main__":
    main()
