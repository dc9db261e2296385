"""Commands in real processes that need not import torch again.

Importing torch, torch._dynamo and torchmetrics takes five seconds of CPU; most commands of a test
then train for a tenth of one. A server imports them once and forks a process for each command, with
the command's own arguments, environment, working directory, files, session and signals, and with
the caller as its parent: to the test it is a process like any other, with an exit code to wait for
and a process id to signal. What such a command starts itself (the ranks of a launch) is forked in
the same way, by a copy of the server that belongs to the command.

What a fork cannot show is what happens while a process imports its modules, what it finds in
variables that libraries read only then, and anything that depends on Python's hash seed, which
forked processes share. Tests of these start their commands cold, and give the reason.
"""
