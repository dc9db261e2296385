"""Code with lines that rules must find, each marked with the rule's name, among lines that look alike."""

DEVICES = """
import os
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # <- first-gpu
other = "cuda:1"  # <- first-gpu
device_type = "cuda" if device.type == "cuda" else "cpu"
if str(device) == "cuda:0":
    note = "trained on cuda:0 and cuda:1"
host = torch.device("cpu")
fixed = torch.device("cuda", 1)  # <- first-gpu
mine = torch.device("cuda", index)
os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # <- first-gpu
os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
model = nn.Linear(2, 2).cuda()  # <- cuda-call
model = make(
    2,
).cuda()  # <- cuda-call
x = torch.zeros(2).to("cuda")  # <- first-gpu
y = torch.zeros(2, device="cuda")  # <- first-gpu
z = torch.zeros(2, device=device)
args.cuda = True
torch.cuda.synchronize()  # <- gpu-only
if torch.cuda.is_available():
    torch.cuda.synchronize()
torch.cuda.is_available() and torch.cuda.synchronize()
try:
    torch.cuda.get_device_name()
except RuntimeError:
    name = "none"
torch.cuda.empty_cache()
free = torch.cuda.mem_get_info()  # <- gpu-only


def report():
    if not torch.cuda.is_available():
        return
    print(torch.cuda.get_device_properties(0))


def wait():
    torch.cuda.synchronize()


if use_gpu:
    wait()

model = nn.DataParallel(model)  # <- data-parallel
model = DDP(model, device_ids=[rank])  # <- gpu-by-rank
model = DDP(model, device_ids=[local_rank])
model = DDP(model, device_ids=[rank % 4])
model.to(rank)  # <- gpu-by-rank
model.to(args.local_rank)
x.to(torch.float16)
"""

ITS_OWN_GPU = """
import os
import torch

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda")
model = make().cuda()
batch = batch.to("cuda")
path = torch.load(file, map_location="cuda:0")  # <- first-gpu
"""

SPAWNED = """
import torch
import torch.multiprocessing as mp


def work(rank):
    model.to(rank)


mp.spawn(work, nprocs=2)
"""

LOADING = """
import glob
import os
import torch
import torchvision
from pathlib import Path
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, random_split

loader = DataLoader(dataset, batch_size=8, shuffle=True)  # <- shuffled-loader
loader = DataLoader(dataset, 8, True)  # <- shuffled-loader
loader = DataLoader(dataset, batch_size=8, shuffle=False)
loader = DataLoader(dataset, batch_size=8)
loader = DataLoader(dataset, sampler=RandomSampler(dataset))  # <- shuffled-loader
loader = DataLoader(dataset, sampler=SequentialSampler(dataset))
loader = DataLoader(dataset, shuffle=(sampler is None), sampler=sampler)
valid_loader = DataLoader(dataset, batch_size=8, shuffle=True)
loader = MyLoader(dataset, shuffle=True)


def never_distributed():
    sampler = None
    return DataLoader(dataset, shuffle=(sampler is None), sampler=sampler)  # <- shuffled-loader


def by_options():
    options = {"batch_size": 8, "shuffle": True}
    return DataLoader(dataset, **options)  # <- shuffled-loader


def by_other_options():
    options = {"batch_size": 8, "shuffle": False}
    return DataLoader(dataset, **options)


sampler = DistributedSampler(dataset)  # <- sampler-epoch
sampler = DistributedSampler(dataset, shuffle=False)  # <- padded-evaluation
train, valid = random_split(dataset, [8, 2])  # <- unseeded-split
train, valid = random_split(dataset, [8, 2], torch.Generator().manual_seed(0))
train, valid = train_test_split(rows, test_size=0.1)  # <- unseeded-split
train, valid = train_test_split(rows, test_size=0.1, random_state=0)
train, valid = train_test_split(rows, shuffle=False)
data = torchvision.datasets.MNIST("data", download=True)  # <- download-by-all
data = torchvision.datasets.MNIST("data", download=rank == 0)
if rank == 0:
    torchvision.datasets.MNIST("data", download=True)


class Pictures:
    def __init__(self, folder):
        self.files = os.listdir(folder)  # <- unsorted-files
        self.more = [x for x in glob.glob(folder + "/*.png")]  # <- unsorted-files
        self.paths = list(Path(folder).rglob("*.jpg"))  # <- unsorted-files
        self.ordered = sorted(os.listdir(folder))
        self.later = glob.glob(folder)
        self.later.sort()
        self.count = len(os.listdir(folder))
        if os.listdir(folder) == []:
            raise ValueError

    def __getitem__(self, index):
        return list(self.folder.glob(f"{index}.*"))


removed = os.listdir("old")
classes = list(set(labels))  # <- set-order
numbers = {name: i for i, name in enumerate(set(labels))}  # <- set-order
classes = sorted(set(labels))
classes = sorted(list(set(labels)))
words = list({word for word in text})  # <- set-order
known = list(set(labels))
known.sort()
"""

SETS_EPOCHS = """
from torch.utils.data import DistributedSampler

sampler = DistributedSampler(dataset)
for epoch in range(3):
    sampler.set_epoch(epoch)
"""

SEEDS = """
import random
import numpy as np
import torch

torch.manual_seed(0)  # <- global-seed
np.random.seed(args.seed)  # <- global-seed
random.seed(0)  # <- global-seed
generator = torch.Generator().manual_seed(0)
rng = np.random.default_rng(0)
torch.manual_seed(seed + rank)  # <- seed-by-rank
seed_offset = get_rank()
np.random.seed(1337 + seed_offset)  # <- seed-by-rank
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

NOT_TRAINING = """
import os
import torch
import numpy as np

np.random.seed(0)
data = torch.randn(8)
os.makedirs("out")
torch.save(data, "data.pt")
for row in data:
    print(row)
torch.save(model.state_dict(), "weights.pt")  # <- save-by-all
loss = explain(image)
loss.backward()
print(image.grad)
"""

LOOP = """
import os
import numpy as np
import torch
import wandb
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("parameters:", count)
os.makedirs("out")  # <- folder-race
os.makedirs("out", exist_ok=True)
if rank == 0:
    os.makedirs("logs")
os.environ["MASTER_ADDR"] = "localhost"  # <- fixed-address
os.environ.setdefault("MASTER_PORT", "29500")
os.environ["MASTER_PORT"] = str(free_port())
torch.distributed.init_process_group("nccl", init_method="tcp://10.0.0.1:2345")  # <- fixed-address
torch.distributed.init_process_group("nccl", init_method="env://")
writer = SummaryWriter("logs")  # <- tracker-by-all
wandb.init()  # <- tracker-by-all
if is_main_process():
    wandb.init()


def train(epoch):
    total = 0.0
    losses = []
    for i, (x, y) in enumerate(tqdm(loader)):  # <- print-by-all
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()  # <- item-per-step
        losses.append(loss.detach())
        if i % 100 == 0:
            print(i, loss.item())  # <- print-by-all
        if i % 100 == 0 and rank == 0:
            print(i, 100 * i / len(loader))
    print(total / len(loader))  # <- print-by-all # <- mean-of-means
    mean = torch.stack(losses).mean()  # <- mean-of-means
    return total / len(loader.dataset)


@torch.no_grad()
def evaluate():
    scores, sizes, times = [], [], []
    right = 0
    for x, y in tqdm(valid_loader, disable=rank != 0):
        right += (model(x).argmax(1) == y).sum().item()
        scores.append(f1_score(model(x), y))
        times.append(clock())
    print(right / len(valid_set))  # <- print-by-all
    progress = epoch / len(loader)
    slow = np.mean(times)
    return np.mean(scores)  # <- mean-of-means


def save(path):
    torch.save(model.state_dict(), path)


def show(text):
    if rank != 0:
        return
    print(text)


for epoch in range(3):
    train(epoch)
    evaluate()
    print(f"rank {rank} is through")
    show("done")
    torch.save(model.state_dict(), f"{epoch}.pt")  # <- save-by-all
    if rank == 0:
        save("best.pt")
"""

STEP_OF_ITS_OWN = """
import torch


class Trainer:
    def step(self, batch):
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()  # <- item-per-step

    def fit(self):
        for batch in self.loader:
            self.step(batch)
        if self.gpu_id == 0:
            self.save()

    def save(self):
        torch.save(self.model.state_dict(), "model.pt")
"""

MODULES = """
import torch
from torch import nn
from pytorch_metric_learning.losses import ContrastiveLoss, NTXentLoss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(8)  # <- batchnorm
        self.bn2 = nn.BatchNorm2d(8)
        self.lazy = nn.LazyLinear(8)  # <- lazy-module
        self.table = nn.Embedding(8, 8, sparse=True)  # <- sparse-gradient
        self.dense = nn.Embedding(8, 8, sparse=False)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("cache", None, persistent=False)
        self.steps = 0

    def forward(self, x):
        self.steps += 1  # <- forward-state
        self.seen += x.sum()
        self.cache = x + self.cache  # <- forward-state
        self.last = x
        x = x + self.last
        if self.mask is None or self.mask.shape != x.shape:
            self.mask = torch.ones_like(x)
        self.history.append(x)  # <- forward-state
        self.average = 0.9 * self.average + x.mean()  # <- forward-state
        self.weight.data.clamp_(0, 1)  # <- forward-weights
        self.layer.weight.data = x  # <- forward-weights
        rows = []
        rows.append(x)
        return x

    def reset(self):
        self.steps = 0


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.calls += 1
        return 2 * x


class Plain:
    def forward(self, x):
        self.calls += 1


net = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # <- sync-batchnorm
criterion = NTXentLoss(0.1)  # <- batch-loss
pairs = ContrastiveLoss()
optimizer = torch.optim.LBFGS(net.parameters())  # <- lbfgs
"""

AGREEMENT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
import samestep

run = samestep.start(epochs=2)
model = DDP(make())  # <- left-wrapper
model, optimizer, loader, valid_loader = run.prepare(model, optimizer, loader, valid_loader)
best, hidden = 1e9, model.begin()
if dist.get_rank() == 0:
    dist.barrier()
for epoch in run.epochs():
    for x, y in loader:
        optimizer.zero_grad()
        y = (y - y.mean()) / (y.std() + 1e-8)  # <- batch-statistics
        out, hidden = model(x, hidden)  # <- carried-state
        run.backward(loss_of(out, y))
        optimizer.step()
        if too_long():
            break  # <- early-break
    val_loss, right = 0.0, 0
    for x, y in valid_loader:
        val_loss += loss_of(model(x), y)
        right += (model(x) == y).sum()
    right = run.reduce(right)
    if run.is_main:
        run.reduce(val_loss)  # <- call-by-one
        write(right)
    if not run.is_main:
        wait()
    if run.world_size > 1:
        total = run.reduce(1)
    if val_loss < best:  # <- own-decision
        best = val_loss
        break
    if right > 100:
        break
z = (a - a.mean()) / (a.std() + 1)
"""

PORTED = """
import samestep
import torch
from torch import nn
from torch.utils.data import DataLoader

run = samestep.start(epochs=3, seed=0)
torch.manual_seed(0)
loader = DataLoader(dataset, batch_size=8, shuffle=True)
model = nn.Sequential(nn.BatchNorm1d(8))
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters()), loader)
for epoch in run.epochs():
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    run.print(total / len(loader))
    print(total)  # <- print-by-all
for step in run.steps(loader):
    step.train(lambda batch: criterion(model(batch.x), batch.y))
    of_steps += step.loss.item()
valid_loader = DataLoader(valid_set, batch_size=8)
right = sum((model(x) == y).sum().item() for x, y in valid_loader)  # <- whole-loader
for i, (x, y) in enumerate(tqdm(valid_loader)):  # <- whole-loader
    right += (model(x) == y).sum().item()
test_loader = DataLoader(test_set, batch_size=8)
right = sum((model(x) == y).sum().item() for x, y in run.eval_batches(test_loader))
for x, y in test_loader:
    show(x)
made = DataLoader(test_set)
evaluate(model, made)
if run.is_main:
    torch.save(model.state_dict(), "model.pt")
torch.save(model.state_dict(), "model.pt")  # <- save-by-all
model.cuda()  # <- cuda-call


class Mine(samestep.Task):
    def loss(self, model, batch):
        torch.manual_seed(batch.step)  # <- global-seed
        return model(batch.x).sum(), len(batch)

    def on_end(self, folder):
        torch.save(self.table, folder / "table.pt")
"""

REST_BESIDE = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset

valid_sampler = DistributedSampler(valid, shuffle=False, drop_last=True)
loader = DataLoader(valid, sampler=valid_sampler)
rest = Subset(valid, range(len(loader.sampler) * world, len(valid)))
"""

PLANTED = {
    "devices": DEVICES,
    "its own gpu": ITS_OWN_GPU,
    "spawned": SPAWNED,
    "loading": LOADING,
    "rest beside": REST_BESIDE,
    "sets epochs": SETS_EPOCHS,
    "seeds": SEEDS,
    "not training": NOT_TRAINING,
    "loop": LOOP,
    "step of its own": STEP_OF_ITS_OWN,
    "modules": MODULES,
    "agreement": AGREEMENT,
    "ported": PORTED,
}
