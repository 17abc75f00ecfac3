"""A data set class for verl: it makes messages of a file's own columns, and gives some rows a tool."""

import datasets
import pyarrow.parquet as pq
from verl.utils.dataset import RLHFDataset


class WordProblems(RLHFDataset):
    def _read_files_and_tokenize(self):
        parts = [datasets.Dataset(pq.read_table(path)) for path in self.data_files]
        self.dataframe = datasets.concatenate_datasets(parts).map(self.to_row)

    def to_row(self, row):
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": row["problem"] + " Think first."}],
            "reward_model": {"style": "rule", "ground_truth": str(row["solution"])},
            "extra_info": {"index": row["number"]},
            "agent_name": "single_turn_agent",
        }


class WithSystem(RLHFDataset):
    """Changes messages alone, in parts, and adds a user's facts to the row."""

    def _build_messages(self, example: dict):
        chat = super()._build_messages(example)
        return [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *chat]

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["tools_kwargs"] = {"calculator": {"create_kwargs": {"n": item}}}
        return row


class Tensors(RLHFDataset):
    def __getitem__(self, item):
        return {"input_ids": [1, 2, 3]}
