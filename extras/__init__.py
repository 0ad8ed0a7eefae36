"""What the trainer uses beside its core files: other formats, sources of frames, commands, log, flags.

Data: lerobot_data (metadata and rows on disk), frames (videos, images, the frame cache), datasets (puts them
together for data.py), check_data (`python data.py check`), sim (the built-in task). Checkpoints: lerobot_ckpt
(LeRobot's files), ckpt_tools (convert, show), hub (downloads, uploads), lora (adapters), pretrained (ImageNet
weights), saving (what a save holds, its end). Commands: flags and lerobot_flags (the command line), checks
and check_policy (what is refused), assembly (parts of a set-up), runlog (console and metrics), rundir
(directory, lock, signals), track (trackers), memory (per rank, on paper), report (curves and films),
environments (what policies act in), ranks and noise (processes and data for tests and measurements).
plain_act is ACT to learn from, which the tests compare model_act.py with.
"""
