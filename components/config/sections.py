"""The sections of a run's configuration, in the order in which an iteration meets them.

Every field carries its meaning below it; `docs/configuration.md` and the JSON schema are made from this file.
`identity()` marks what makes a run the run that it is: a run resumes only with the same identity.
Fields without the mark may change when a run is resumed, and each change is recorded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

LARGEST_SEED = 2**31 - 1
"""What every library takes that is given one."""
WEEK_S = 604_800.0
"""Longest time to wait for anything."""


SWITCH = "switch"
"""Type of the error for a value that is true or false; its context names the field."""


def identity(default: Any = ..., **kwargs: Any) -> Any:
    """A field that belongs to the identity of a run."""
    return Field(default, json_schema_extra={"identity": True}, **kwargs)


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are immutable, field docstrings are descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_switches(cls, fields: Any) -> Any:
        """No field of any section is one, and `true` would pass for the number 1."""
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields:
                told = {"field": name, "found": str(value).lower()}
                raise PydanticCustomError(
                    SWITCH,
                    "expected a number, a text or a mapping, found {found} (so YAML reads on, off, yes and no: quote a text)",
                    told,
                )
        return fields


class ModelConfig(Section):
    """The policy: which weights the run starts from."""

    source: str = identity(pattern=r"^(file:.+|input:[0-9a-f]{64})$")
    """Where the base model is: `file:PATH` (a Hugging Face folder; relative to the configuration file, uploaded by the
    launching command) or `input:SHA256` (already in the store). Pods only ever see the second form."""

    dtype: Literal["float32", "bfloat16"] = identity("float32")
    """Type of the published weights and of the engines that serve them. `float32` keeps sampling and training
    log-probabilities within about 1e-6 of each other; `bfloat16` halves the bytes of a reload."""


class ReasoningGymConfig(Section):
    """Prompts from a task of the reasoning-gym library, generated once per run and stored."""

    kind: Literal["reasoning_gym"] = identity()
    """Selects this kind of environment."""

    task: str = identity(min_length=1)
    """Name of the task, e.g. `chain_sum`."""

    options: dict[str, Any] = identity(default_factory=dict)
    """Options of the task, passed to `reasoning_gym.create_dataset`, e.g. `{min_terms: 2, max_terms: 2}`."""

    prompt_pattern: str | None = identity(None)
    """Regular expression whose first group becomes the prompt (the wording around it teaches a small model nothing).
    Unset: the whole question."""

    prompt_template: str = identity("{prompt}")
    """Text given to the model; `{prompt}` is replaced by the prompt."""

    rows: int = identity(1024, ge=2, le=10_000_000)
    """Rows generated before duplicates of a prompt are dropped."""

    seed: int = identity(0, ge=0, le=LARGEST_SEED)
    """Seed of the generator."""

    heldout_rows: int = identity(128, ge=1, le=10_000_000)
    """Rows set aside for evaluation. Their prompts never occur in training."""


class DatasetConfig(Section):
    """Prompts from a JSONL or Parquet file with a prompt column and an answer column."""

    kind: Literal["dataset"] = identity()
    """Selects this kind of environment."""

    source: str = identity(pattern=r"^(file:.+|input:[0-9a-f]{64})$")
    """`file:PATH` of a .jsonl or .parquet file (uploaded by the launching command) or `input:SHA256`."""

    prompt_column: str = identity("prompt", min_length=1)
    """Column with the prompt text."""

    answer_column: str = identity("answer", min_length=1)
    """Column with the expected answer (text)."""

    prompt_template: str = identity("{prompt}")
    """Text given to the model; `{prompt}` is replaced by the prompt."""

    heldout_rows: int = identity(128, ge=1, le=10_000_000)
    """Rows set aside for evaluation. Their prompts never occur in training."""

    seed: int = identity(0, ge=0, le=LARGEST_SEED)
    """Seed of the split between training and held-out rows."""


class OwnEnvironmentConfig(Section):
    """An environment of the user's own package, found by its entry point in the group `colchis.environments`."""

    kind: Literal["own"] = identity()
    """Selects this kind of environment."""

    name: str = identity(pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the entry point."""

    options: dict[str, Any] = identity(default_factory=dict)
    """Options passed to the environment's constructor."""

    heldout_rows: int = identity(128, ge=1, le=10_000_000)
    """Rows set aside for evaluation. Their prompts never occur in training."""

    seed: int = identity(0, ge=0, le=LARGEST_SEED)
    """Seed given to the environment."""


EnvironmentConfig = Annotated[ReasoningGymConfig | DatasetConfig | OwnEnvironmentConfig, Field(discriminator="kind")]


class RolloutConfig(Section):
    """How trajectories are generated."""

    prompts: int = identity(32, ge=1, le=1_000_000)
    """Prompts (groups) per iteration."""

    group_size: int = identity(8, ge=1, le=4096)
    """Samples per prompt. A group is the unit of the advantage."""

    shards: int = Field(1, ge=1, le=100)
    """Rollout pods per iteration; prompts are split evenly over them."""

    max_new_tokens: int = identity(16, ge=1, le=1_000_000)
    """Longest completion of one model turn, in tokens."""

    max_turns: int = identity(1, ge=1, le=64)
    """Most model turns in one episode."""

    temperature: float = identity(1.0, gt=0, le=10)
    """Sampling temperature. The trainer divides its logits by the same number."""

    top_p: float = identity(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the behaviour log-probabilities are those of the untruncated distribution."""

    top_k: int = identity(-1, ge=-1)
    """Sample among the k most likely tokens; -1: all."""

    stop: list[str] = identity(default_factory=list)
    """Texts that end a completion, besides the end-of-sequence token of the tokenizer."""

    partials: Literal["drop", "resume"] = Field("drop")
    """What becomes of the tokens of an answer that an engine aborts (`reload.pause: abort`, a shutdown). `drop`: the sample is
    drawn anew, and is what it would have been. `resume`: they are kept, each with the version that drew it, and the rest is
    asked for; with `abort`ed long answers nothing is drawn twice, but the sample depends on when it was aborted."""

    concurrency: int = Field(64, ge=1, le=4096)
    """Requests in flight per rollout pod."""

    request_timeout_s: float = Field(120.0, gt=0, le=WEEK_S)
    """Longest wait for one answer before another engine is tried."""

    environment_timeout_s: float = identity(60.0, gt=0, le=WEEK_S)
    """Longest wait for the environment (its tools included) to answer one model turn. Past it the episode ends without
    a score."""

    deadline_s: float = Field(1800.0, gt=0, le=WEEK_S)
    """Longest time for one rollout shard."""


class GraderConfig(Section):
    """How trajectories get their scores."""

    face: Literal["exact", "rule", "environment", "own"] = identity("exact")
    """`exact`: text equal to the answer after stripping. `rule`: a regular expression finds the answer, compared as
    text or as number. `environment`: the environment's own verdict. `own`: an entry point in the group `colchis.graders`."""

    placement: Literal["inline", "step", "pool"] = Field("inline")
    """`inline`: in the rollout pod. `step`: pods of their own between rollout and batch. A face never knows its
    placement. `pool` (an own deployment with a queue) is not built yet."""

    shards: int = Field(1, ge=1, le=100)
    """Grader pods per iteration when `placement` is `step`."""

    workers: int = Field(1, ge=1, le=64)
    """Processes per pod that run graders which may hang or crash (`rule`, `environment`, `own`)."""

    timeout_s: float = identity(5.0, gt=0, le=WEEK_S)
    """Longest time for one verdict; past it the reason is `timeout`, also when native code hangs."""

    pattern: str | None = identity(None)
    """`rule`: regular expression; its first group (or whole match) is the answer."""

    tolerance: float | None = identity(None, ge=0)
    """`rule`: compare as numbers within this absolute tolerance. Unset: compare as text."""

    name: str | None = identity(None)
    """`own`: name of the entry point."""

    options: dict[str, Any] = identity(default_factory=dict)
    """`own`: options passed to the grader's constructor."""


class AlgorithmConfig(Section):
    """From verdicts to a loss."""

    estimator: Literal["grpo", "dr_grpo", "rloo"] = identity("grpo")
    """`grpo`: (r - mean) / std with ddof 1. `dr_grpo`: r - mean. `rloo`: r - mean of the others."""

    min_valid: int = identity(2, ge=1)
    """Fewest scored members of a group; a group with fewer leaves the batch and is counted."""

    min_spread: float = identity(1e-3, ge=0)
    """Relative spread (std over the larger of 1 and |mean|) below which a group carries no signal; it is dropped and
    counted, never divided by."""

    aggregation: Literal["token-mean", "sequence-mean", "constant"] = identity("token-mean")
    """What the summed loss is divided by: all trained tokens of the optimiser step; each sequence's own tokens, then
    all sequences; or sequences times `rollout.max_new_tokens`."""

    clip_low: float = identity(0.2, gt=0, lt=1)
    """Lower PPO clip: ratios under 1 - clip_low give no further gradient."""

    clip_high: float = identity(0.2, gt=0)
    """Upper PPO clip: ratios over 1 + clip_high give no further gradient."""

    dual_clip: float | None = identity(3.0, gt=1)
    """Bound of the loss for negative advantages, as a multiple of |A|. Unset: none."""

    kl_coefficient: float = identity(0.0, ge=0)
    """Weight of the k3 estimate of KL(policy || reference) in the loss; 0: no reference model is loaded."""


class TrainerConfig(Section):
    """The optimiser step."""

    learning_rate: float = identity(5e-4, gt=0, le=1)
    """Peak learning rate of AdamW."""

    schedule: Literal["constant", "linear", "cosine"] = identity("constant")
    """Shape after the warm-up. `linear` and `cosine` fall to zero at `schedule_iterations`."""

    schedule_iterations: int | None = identity(None, ge=1)
    """Length of a falling schedule in iterations; part of the identity, so that `loop.iterations` may grow."""

    warmup_iterations: int = identity(0, ge=0)
    """Iterations over which the learning rate rises linearly from zero."""

    betas: tuple[float, float] = identity((0.9, 0.95))
    """AdamW's betas."""

    epsilon: float = identity(1e-8, gt=0)
    """AdamW's epsilon."""

    weight_decay: float = identity(0.0, ge=0)
    """AdamW's decoupled weight decay."""

    max_grad_norm: float = identity(1.0, gt=0)
    """Gradients are scaled down to this global norm."""

    micro_batch_tokens: int = identity(8192, ge=16)
    """Tokens (prompt and completion) per packed micro-batch. A trajectory longer than this is refused."""

    steps: int = identity(1, ge=1, le=64)
    """Optimiser steps per iteration: the batch's samples are split into this many parts by group."""

    lora_rank: int = identity(0, ge=0, le=1024)
    """Train low-rank adapters of this rank beside frozen weights; 0: train all weights. The optimiser's
    state shrinks to that of the adapters; how engines get them is `reload.adapters`."""

    lora_alpha: float = identity(16.0, gt=0)
    """Adapters are scaled by `lora_alpha / lora_rank`."""

    lora_targets: tuple[str, ...] = identity(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers that get an adapter, by the last part of their names."""

    ranks: int = Field(1, ge=1)
    """Training processes. More than one is not built yet."""

    gap_alert: float | None = Field(None, gt=0)
    """Mean absolute gap between sampling and training log-probabilities above which the summary carries an alert. By default
    0.001, or 0.02 with `model.dtype: bfloat16`."""


class ReloadConfig(Section):
    """How new weights get into the engines."""

    pause: Literal["retract", "abort"] = Field("retract")
    """What happens to requests in flight: kept, with their cache rebuilt under the new weights, or aborted."""

    delta: Literal["auto", "never"] = Field("auto")
    """`auto`: publish, beside the whole files, the bits that differ from the version before when these are much fewer (they
    are with `model.dtype: bfloat16` and a small learning rate); agents that have that version fetch no more."""

    transfer: Literal["store", "gloo", "nccl"] = Field("store")
    """How a version gets to the engines. `store`: each agent fetches it while its engine serves. `gloo`, `nccl`: one copy is
    fetched where the reload runs, and broadcast over that backend into the paused engines; those that cannot receive (and
    embedded engines before their first version) fetch it as ever."""

    adapters: Literal["auto", "merged"] = Field("auto")
    """With `trainer.lora_rank`. `auto`: engines that serve adapters (SGLang started with `--enable-lora`) get the adapter alone,
    beside the base model, without a pause; others get the two merged. `merged`: all do."""

    prepare_deadline_s: float = Field(600.0, gt=0, le=WEEK_S)
    """Longest time for an engine's agent to fetch and verify a version, while the engine goes on serving."""

    activate_deadline_s: float = Field(120.0, gt=0, le=WEEK_S)
    """Longest time for pause, load, checksum, version and continue on one engine; also the lease on the pause."""

    probe_tolerance: float | None = Field(None, gt=0)
    """Mean absolute gap between the engine's and the trainer's log-probabilities of the probe tokens that a reload lets pass;
    a single token's may be 25 times as large. By default 0.0002, or 0.02 with `model.dtype: bfloat16`, in which two programs
    round by about 0.005."""


class EvaluationConfig(Section):
    """Greedy accuracy on held-out prompts, measured beside the rollout of an iteration."""

    every: int = Field(0, ge=0)
    """Evaluate each so many iterations, besides the first and the last version; 0: only those two."""

    prompts: int = Field(128, ge=1, le=10_000_000)
    """Held-out prompts per evaluation."""


class LoopConfig(Section):
    """How long a run goes on."""

    iterations: int = Field(10, ge=1, le=1_000_000)
    """Iterations of the whole run."""

    window: int = Field(50, ge=1, le=100)
    """Iterations per Workflow object; the last step of a Workflow starts its successor."""

    seed: int = identity(0, ge=0, le=LARGEST_SEED)
    """Seed of prompts order, sampling and training."""

    max_empty: int = Field(3, ge=1)
    """Consecutive iterations without a trainable group after which the run ends with that reason."""

    target_reward: float | None = Field(None)
    """End the run once the mean reward of an iteration reaches this."""

    max_lag: int = identity(0, ge=0)
    """Versions that a trained token may lag behind the policy. The synchronous mode allows 0 only."""
