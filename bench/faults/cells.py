"""The cells of the fault matrix: which process meets which fault, in which phase of a run.

A phase begins when a role enters a state (the ledger's states); the fault comes a random time after that.
"""

from dataclasses import dataclass

ROLES = (
    "launcher", "controller", "learner", "learner-1", "engine", "engine-1", "fork server", "verifier worker",
)  # fmt: skip
VLLM = "vLLM engine"
LORA = "--model.lora.rank 4 --learner.lr 1e-3"
SFT = "--objective.loss sft --objective.advantage_norm none --pipeline.scheme ppo_off_policy"
SFT += " --objective.aggregation token --pipeline.minibatches 2"
TEACHER = "--objective.kl.to tiny --objective.kl.place as_advantage --objective.kl.estimator k1"
TEACHER += " --objective.kl.coefficient 1 --objective.advantage_norm none"
SERVER, MIXTURE = "SERVER", "MIXTURE"  # words that stand for a server's URL, and a model's folder
SERVED = TEACHER.replace("tiny", SERVER) + " --objective.kl.api_key_env SIGMOID_RL_TOKEN"
SERVED += " --objective.kl.deadline_s 8"
EXPERTS = f"--model.path {MIXTURE} --model.replay_experts true"
TOP_K = "--objective.kl.to tiny --objective.kl.top_k 5 --objective.kl.coefficient 1"
GUESS = "trainer.environments.guess"
EPISODES = f"--data.source {GUESS}:rows --data.size 80 --engine.max_new_tokens 32"
EPISODES += f" --environment.kind {GUESS}:Guess --environment.turn_s 5"
# phase -> the role and state that it begins with, and how long after that a fault comes at most, in seconds
PHASES = {
    "start-up": ("", "", 8.0),
    "generating": ("engine", "generate", 0.05),
    "pushing weights": ("engine", "weight_update", 0.01),
    "training": ("learner", "forward_backward", 0.08),
    "writing a checkpoint": ("learner", "checkpoint", 0.2),
    "evaluating": ("engine", "evaluate", 0.1),
    "scoring": ("learner", "score", 0.02),
    "ending": ("", "", 0.8),
}
EVERY_RUN = tuple(phase for phase in PHASES if phase != "scoring")  # that of a teacher
KILLED, FROZEN, FULL, READ_ONLY, CLOCK = "killed", "frozen", "disk full", "read-only folder", "clock jumps"
NAN, INF = "NaN gradient", "infinite log-probability"
FLAGS = {"learner-1": "--learner.ranks 2", "engine-1": "--engine.count 2", VLLM: "--engine.kind vllm"}
# Other kinds of run: the role's name in the matrix -> its process, the run's options, the phases that differ
OTHER_RUNS = {
    "learner, LoRA": ("learner", LORA, ("pushing weights", "training", "writing a checkpoint")),
    "engine, LoRA": ("engine", LORA, ("generating", "pushing weights")),
    f"{VLLM}, LoRA": ("engine", f"{FLAGS[VLLM]} {LORA}", ("generating", "pushing weights")),
    "controller, SFT": ("controller", SFT, ("training", "writing a checkpoint")),
    "learner, SFT": ("learner", SFT, ("training", "evaluating")),
    "learner, teacher": ("learner", TEACHER, ("scoring", "training")),
    "learner, top-k": ("learner", TOP_K, ("training",)),
    "teacher's server": ("teacher", SERVED, ("generating", "training")),
    "controller, experts": ("controller", EXPERTS, ("training",)),
    "engine, experts": ("engine", EXPERTS, ("generating",)),
    "environment": ("verifier worker", EPISODES, ("generating", "evaluating")),
    "environments' fork server": ("fork server", EPISODES, ("generating", "evaluating")),
}
CULPRITS = {
    "run folder": ("space", "Read-only", "read-only"),
    "learner-1": ("learner-1", "learner rank 1"),
    "fork server": ("verif",),
    "verifier worker": ("verif",),
}
FATAL = ("launcher", "controller", "learner", "learner-1", "teacher")  # whose death ends the run


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell; `name` is unique."""

    role: str
    phase: str
    fault: str

    @property
    def name(self) -> str:
        return f"{self.role}, {self.phase}, {self.fault}"

    @property
    def process(self) -> str:
        """The role's name in the run."""
        return OTHER_RUNS[self.role][0] if self.role in OTHER_RUNS else self.role.removeprefix("vLLM ")

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of the run: a second rank or engine for the cells that are about it."""
        flags = OTHER_RUNS[self.role][1] if self.role in OTHER_RUNS else FLAGS.get(self.role, "")
        return tuple((flags or "--engine.count 1").split())

    @property
    def fatal(self) -> bool:
        """True if the run may end, if it says why."""
        ends = self.process in (*FATAL, "run folder") or self.phase in ("start-up", "ending")
        return ends or self.fault in (FROZEN, INF)

    @property
    def culprit(self) -> tuple[str, ...]:
        """Words, one of which names the process in an error line, or says what is wrong with the disk."""
        return CULPRITS.get(self.process, (self.process,))


def all_cells() -> list[Cell]:
    """The matrix. Disks are full, and folders read-only, where something is written; numbers are not finite
    where something computes."""
    cells = [Cell(role, phase, fault) for fault in (KILLED, FROZEN) for role in ROLES for phase in EVERY_RUN]
    cells += [Cell("run folder", phase, FULL) for phase in ("generating", "writing a checkpoint", "ending")]
    cells += [Cell("run folder", "writing a checkpoint", READ_ONLY), Cell("machine", "generating", CLOCK)]
    cells += [Cell("learner", "training", NAN), Cell("engine", "generating", INF)]
    cells += [Cell(VLLM, phase, fault) for fault in (KILLED, FROZEN) for phase in EVERY_RUN]
    cells += [Cell(role, phase, KILLED) for role, (_, _, phases) in OTHER_RUNS.items() for phase in phases]
    others = ("environment", "teacher's server")
    return cells + [Cell(role, phase, FROZEN) for role in others for phase in OTHER_RUNS[role][2]]
