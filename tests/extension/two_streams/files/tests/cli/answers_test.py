#!/usr/bin/env python3
"""`megatron pretrain --task answers` on files of questions and answers: a resumed run has the bits of an uninterrupted one.

Usage: answers_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import os
import random
import shutil
import struct

import parallel_test as ranks
import support

SAVE_EVERY = 3


def write_dataset(prefix, documents):
    """An indexed dataset; documents are lists of sequences of token ids."""
    sequences = [ids for document in documents for ids in document]
    ends = [0]
    for document in documents:
        ends.append(ends[-1] + len(document))
    places = [0]
    for ids in sequences:
        places.append(places[-1] + 2 * len(ids))
    with open(prefix + ".bin", "wb") as file:
        for ids in sequences:
            file.write(struct.pack(f"<{len(ids)}H", *ids))
    with open(prefix + ".idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sequences), len(ends)))
        file.write(struct.pack(f"<{len(sequences)}i", *map(len, sequences)))
        file.write(struct.pack(f"<{len(sequences)}q", *places[:-1]))
        file.write(struct.pack(f"<{len(ends)}q", *ends))


class AnswersTest(support.FolderTest):
    def setUp(self):
        super().setUp()
        draw = random.Random(5)
        for name in ("first", "second"):
            documents = [[[draw.randrange(250) for _ in range(draw.randrange(1, 30))] for _ in range(2)] for _ in range(40)]
            write_dataset(self.path(name), documents)
        run = [flag for flag in ranks.RUN if flag != "--mock-data"]
        self.flags = ["pretrain", *ranks.MODEL, *run, "--task", "answers", "--optimizer", "adam", "--data-path", "0.3", self.path("first"),
                      "0.7", self.path("second"), "--split", "1,1,0", "--save-interval", str(SAVE_EVERY)]

    def train(self, count, *flags):
        ranks.BINARY = support.BINARY
        codes, out, error = ranks.finish(ranks.start(count, [*self.flags, *flags]))
        self.assertEqual(set(codes), {0}, error + out)

    def test_resumed_runs_have_the_same_bits(self):
        for count in (1, 2):
            with self.subTest(ranks=count):
                whole, resumed = self.path(f"whole{count}"), self.path(f"resumed{count}")
                self.train(count, "--save", whole)
                name = f"iter_{SAVE_EVERY:07}"
                shutil.copytree(os.path.join(whole, name), os.path.join(resumed, name))
                self.train(count, "--load", resumed, "--save", resumed)
                self.assertEqual(ranks.tensors(resumed, 2 * SAVE_EVERY), ranks.tensors(whole, 2 * SAVE_EVERY))
                losses, again = ranks.records(whole), ranks.records(resumed)
                for iteration in range(SAVE_EVERY + 1, 2 * SAVE_EVERY + 1):
                    self.assertEqual(again[iteration]["lm loss"], losses[iteration]["lm loss"])
                self.assertLess(losses[6]["lm loss"], losses[1]["lm loss"])


if __name__ == "__main__":
    support.main()
