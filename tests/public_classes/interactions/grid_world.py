"""A game with reset and step behind it, whose state is in the row."""

from uuid import uuid4

from verl.interactions.base import BaseInteraction


class Grid:
    MOVES = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}

    def reset(self, goal):
        self.at, self.goal = (0, 0), tuple(goal)
        return f"you are at {self.at}"

    def step(self, action):
        move = self.MOVES.get(action)
        if move is None:
            return "no such move", -0.1, False
        self.at = (self.at[0] + move[0], self.at[1] + move[1])
        return f"you are at {self.at}", float(self.at == self.goal), self.at == self.goal


class GridWorldInteraction(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self.most, self.games = config.get("max_steps", 5), {}

    async def start_interaction(self, instance_id=None, goal=(1, 1), **kwargs):
        instance_id = instance_id or str(uuid4())
        self.games[instance_id] = {"grid": Grid(), "steps": 0}
        self.games[instance_id]["grid"].reset(goal)
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        game = self.games[instance_id]
        game["steps"] += 1
        said, reward, done = game["grid"].step(messages[-1]["content"].strip().lower())
        return done or game["steps"] >= self.most, said, reward, {"steps": game["steps"]}

    async def finalize_interaction(self, instance_id, **kwargs):
        self.games.pop(instance_id, None)
