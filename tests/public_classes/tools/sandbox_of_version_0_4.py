"""verl 0.4's sandbox: no memory limit, and the text in place of the reward."""

from verl.tools.base_tool import BaseTool
from verl.utils.reward_score.sandbox_fusion.utils import _process_single_case


class OldSandbox(BaseTool):
    def execute_code(self, code, timeout=30, language="python"):
        status, facts = _process_single_case(0, None, None, self.config["sandbox_fusion_url"], code, timeout, language)
        return facts["stdout"] if facts["run_status"] == "Finished" else "no output"

    async def execute(self, instance_id, parameters, **kwargs) -> tuple[str, float, dict]:
        result = self.execute_code(parameters["code"])
        return result, result, result.strip()
