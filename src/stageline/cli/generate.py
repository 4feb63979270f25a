"""`stageline generate`: continue a prompt with the model of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from typer import Argument, Option

from stageline.common.errors import StagelineError
from stageline.train.config.config import Parallelism
from stageline.train.config.ranks import processes_to_start
from stageline.train.run_folder import checkpoints_of


def command(
    run: Annotated[
        str,
        Argument(
            metavar="RUN",
            help="Folder of a run, such as outputs; or a folder of checkpoints, or a single checkpoint.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        str | None, Option("--prompt", metavar="TEXT", help="Text to continue. Default: the prompt of the run.")
    ] = None,
    tokens: Annotated[int, Option("--tokens", min=1, help="Number of tokens to generate.")] = 200,
    greedy: Annotated[bool, Option("--greedy", help="Always pick the most likely token.")] = False,
    temperature: Annotated[
        float | None, Option("--temperature", help="Sampling temperature; 0 is greedy. Default: that of the run.")
    ] = None,
    top_k: Annotated[
        int, Option("--top-k", help="Sample only from this many of the most likely tokens; 0 means all.")
    ] = 0,
    top_p: Annotated[
        float | None,
        Option(
            "--top-p",
            help="Sample only from the most likely tokens whose probabilities add up to this. Default: that of the "
            "run.",
        ),
    ] = None,
    seed: Annotated[int, Option("--seed", min=0, help="Random seed; the same seed gives the same text.")] = 0,
    step: Annotated[int, Option("--step", min=-1, help="Step of the checkpoint; -1 is the newest intact one.")] = -1,
    tokenizer: Annotated[
        str, Option("--tokenizer", metavar="PATH", help="A tokenizer.json to use instead of the run's.")
    ] = "",
    ranks: Annotated[
        int, Option("-p", "--ranks", min=0, help="Ranks of the pipeline; 0 means as many as stageline train starts.")
    ] = 0,
    launcher: Annotated[
        Literal["processes", "threads"],
        Option("--launcher", metavar="processes|threads", help="How to run the ranks on this machine."),
    ] = "processes",
) -> None:
    """Continue a prompt with the newest checkpoint of a run, and print the text as it is generated.

    The model runs as a pipeline, as in training: on processes of this machine, or on those that torchrun, SLURM or Ray
    started. The number of ranks does not change the text.

    Examples:
      stageline generate outputs --prompt "def main("
      stageline generate outputs --prompt "class" --tokens 400 --temperature 0.7 --top-k 50
      stageline generate outputs --greedy --ranks 2 --launcher threads
    """
    from stageline.train.checkpoint.manifest import MANIFEST
    from stageline.train.checkpoint.remote import location

    where = checkpoints_of(run)
    if not location(run).exists():
        raise StagelineError(f"{run} does not exist; expected the folder of a run, such as outputs")
    check_checkpoints(run, str(where), is_checkpoint=(where / MANIFEST).exists())
    for name, value in (("--temperature", temperature), ("--top-k", top_k), ("--top-p", top_p)):
        if greedy and value:
            raise StagelineError(
                f"{name} is {value}, but --greedy always picks the most likely token; leave out one of the two"
            )
    choices = {"temperature": 0.0 if greedy else temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    sampling: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    parallelism = Parallelism(launcher=launcher, pipeline_parallel_degree=ranks or -1)
    processes = processes_to_start(parallelism)

    from stageline.train.generation import Sampling
    from stageline.train.generation_job import GenerationRequest, generate_on, generate_text

    if prompt is not None and prompt.encode(errors="ignore").decode() != prompt:  # bytes that are not UTF-8
        raise StagelineError(f"--prompt must be UTF-8 text, got {prompt!a}")
    Sampling(**sampling)  # raises if a value is out of range
    request = GenerationRequest(str(where), prompt, tokens, sampling, parallelism, step, tokenizer)
    if processes > 1:
        generate_on(processes, request)
    else:
        generate_text(request)


def check_checkpoints(run: str, folder: str, *, is_checkpoint: bool) -> None:
    """Raise if a run has no checkpoint."""
    from stageline.train.checkpoint import published

    if not is_checkpoint and not published(folder):
        where = "" if folder == run else f" in {folder}"
        raise StagelineError(
            f"{run} has no checkpoint{where}; a run saves one every checkpoint.interval steps and at the end"
        )
