"""The training frame: batch in, weights out. Imports torch; nothing else in a pod's torch-free stages may import it."""

from colchis.components.trainer.probe import Probe, logprobs_of
from colchis.components.trainer.train import TrainResult, train_iteration

__all__ = ["Probe", "TrainResult", "logprobs_of", "train_iteration"]
