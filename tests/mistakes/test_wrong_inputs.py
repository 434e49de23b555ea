"""What users get wrong, several hundred times: each ends in one sentence, and in no traceback.

The files that are wrong are made once (`made_files`). Commands run in this process, by the same
`main` that the script calls; what a command would start does not start.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, RecordDict
from torch import nn

import fedkeep
import fedkeep.cli
from fedkeep import Keeper
from fedkeep.agent.assembly import assemble, read_config
from fedkeep.agent.service import Service
from fedkeep.core.errors import FedkeepError
from fedkeep.deploy.credentials import provision
from fedkeep.flower.server_app import check_specification
from fedkeep.keyholder.sealing import create_key
from tests.mistakes.made_files import AGENT, FLEET, make_files

RNG = np.random.default_rng(0)
X, Y, D = RNG.normal(size=(60, 3)), np.arange(60) % 2, np.arange(60) % 3
FRAME = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "label": Y, "device": D})
DEMO = {"task": {"name": "demo", "devices": 4}, "train": {"rounds": 2}}
CONTEXT = Context(run_id=1, node_id=5, node_config={}, state=RecordDict(), run_config={})
NET = nn.Sequential(nn.Linear(3, 2))
QUICK: dict[str, Any] = {"rounds": 2, "seeds": 1, "jobs": 1, "progress": False, "methods": ["fifo"]}


def compared(*arrays: Any, **options: Any) -> Any:
    return fedkeep.compare(*arrays, **{**QUICK, **options})


DATA = [
    ("missing.csv", "there is no file missing.csv; a relative path starts at the"),
    ("empty.csv", "is empty: its first line must name the columns"),
    ("header.csv", "there is no sample in"),
    ("binary.csv", "is not text in UTF-8: save it as CSV in UTF-8"),
    ("utf16.csv", "is not text in UTF-8: save it as CSV in UTF-8"),
    ("latin.csv", "is not text in UTF-8: save it as CSV in UTF-8"),
    ("ragged.csv", "line 62: 3 cells, but the header has 4"),
    ("long.csv", "line 62: 5 cells, but the header has 4"),
    ("twice.csv", "has 2 columns called 'a': give each a name of its own"),
    ("text.csv", "line 62: a is 'warm', which is no number: leave the column out,"),
    ("nan.csv", "line 62: a feature is missing, NaN or infinite"),
    ("inf.csv", "line 62: a feature is missing, NaN or infinite"),
    ("blank.csv", "line 62: a is '', which is no number: leave the column out, or"),
    ("huge.csv", "line 62: a feature is missing, NaN or infinite"),
    ("nolabel.csv", "line 62: label '' is neither a whole number nor a name"),
    ("nodevice.csv", "line 62: device '' is neither a whole number nor a name"),
    ("onelabel.csv", "has a single label, 'ok': there is nothing to tell apart"),
    ("unnamed.csv", "column 3 has no name: if it counts the rows, leave it out (in"),
    ("commas.csv", "cells, but the header has 1 (its cells are separated by ';': save it with"),
    ("semicolon.csv", "has no column 'label'; it has device;label;a;b (its cells are"),
    ("tabs.csv", "has no column 'label'; it has device\\tlabel\\ta\\tb (its cells"),
    ("unix.csv", "t looks like a time since 1970, and a time is no feature: set"),
    ("testcol.csv", "line 2: test must be 0 or 1, got 'maybe'"),
    ("alltest.csv", "there is no sample for training in alltest.csv"),
    ("notest.csv", "there is no sample for testing in notest.csv: give devices more samples"),
    ("onlylabels.csv", "has no feature columns besides device, label"),
    ("nul.csv", "line 62: a cell holds a zero byte"),
    ("quote.csv", "line 62: 2 cells, but the header has 4"),
    ("bigcell.csv", "cannot be read as CSV: field larger than field limit"),
    ("nowheader.csv", "has no column 'label'; it has d0, no, 0.0, 0 (set"),
    ("data.txt", "must end in .npz, .csv or .parquet"),
    ("folder.csv", "is a folder: name a file in it"),
    ("binary.npz", "is no npz file, or holds Python objects: save plain arrays with"),
    ("empty.npz", "cannot be read as npz: No data left in file"),
    ("nox.npz", "has no array 'x'; it has device, features, y"),
    ("noy.npz", "has no array 'y'; it has device, x"),
    ("nod.npz", "has no 'device' to say whose a sample is: add it, set device,"),
    ("short.npz", "y has 5 entries, but x has 60"),
    ("scalar.npz", "y is a single value, not one a sample"),
    ("xscalar.npz", "x is a single value, not one a sample"),
    ("objects.npz", "is no npz file, or holds Python objects: save plain arrays with"),
    ("text.npz", "x must be numbers, got <U1"),
    ("complex.npz", "x must be numbers, got complex128"),
    ("y2.npz", "label must be one value a sample, got shape (60, 2)"),
    ("zero.npz", "there is no sample in"),
    ("nofeature.npz", "a sample has no feature, x has shape (60, 0)"),
    ("big.npz", "sample 0: a feature is missing, NaN or infinite"),
    ("none.npz", "has no array 'x'; it has none"),
    ("floaty.npz", "the label takes 2 different numbers, such as 0.5: say what they"),
    ("floatd.npz", "sample 0: device '0.5' is neither a whole number nor a name"),
    ("lost.npz", "sample 0: device '1.152921504606847e+18' is a float above 2^53,"),
    ("dates.npz", "x must be numbers, got datetime64[s]"),
    ("truncated.npz", "cannot be read as npz: File is not a zip file"),
    ("flipped.npz", "cannot be read as npz: Bad CRC-32 for file 'x.npy'"),
    ("plain.npz", "is one array (npy): save x, y and device with np.savez"),
    ("folder.npz", "is a folder: name a file in it"),
    ("binary.parquet", "cannot be read as Parquet: Could not open Parquet input source"),
    ("empty.parquet", "cannot be read as Parquet: Could not open Parquet input source"),
    ("nested.parquet", "row 0: a is '[1. 2.]', which is no number: leave the column"),
    ("null.parquet", "row 0: a feature is missing, NaN or infinite"),
    ("nulllabel.parquet", "row 1: label 'None' is neither a whole number nor a name"),
    ("nolabel.parquet", "has no column 'label'; it has device, a (set task.label)"),
    ("sources.py:missing", "'sources.py' has no 'missing': known are: broken, empty, needs,"),
    ("sources.py:empty", "yielded no sample"),
    ("sources.py:number", "gave 5, not samples: it must return or yield tuples (device, x,"),
    ("sources.py:needs", "source 'sources.py:needs' must work without arguments: missing"),
    ("sources.py:pairs", "item 0 is not a tuple (device, x, y)"),
    ("sources.py:shapes", "sample 1 has shape (2,), but sample 0 has (1,); all must have"),
    ("sources.py:broken", "raised KeyError: 'pump'"),
    ("sources.py:raises", "raised KeyError: 'pump' (sources.py, line 12)"),
    ("sources.py:words", "x must be numbers, got <U4"),
    ("sources.py:nothing", "sample 0: device 'None' is neither a whole number nor a name"),
    ("sources.py:ragged", "sample 0 is no array: its rows differ in length"),
    ("sources.py:thing", "source 'sources.py:thing' is no function"),
    ("syntax.py:f", "cannot import 'syntax.py': invalid syntax in line 1"),
    ("importing.py:f", "cannot import 'importing.py' (of 'importing.py:f'): No module"),
    ("failing.py:f", "cannot import 'failing.py' (of 'failing.py:f'): division by zero"),
    ("quits.py:f", "cannot import 'quits.py' (of 'quits.py:f'): it ends the process"),
    ("nomodule:f", "cannot import 'nomodule' (of 'nomodule:f'): No module named"),
    ("nofile.py:f", "there is no file nofile.py (of 'nofile.py:f')"),
    (":f", "':f' is not of the form module:name or path/to/file.py:name"),
    ("good.csv:", "'good.csv:' is not of the form module:name or"),
    ("sources.py", "source must look like 'module:function', got 'sources.py'"),
]
SETTINGS = [
    ("train=5", "'train' must be a table, got 5"),
    ("train.rounds.x=5", "'train.rounds' cannot be {'x': 5}: expected a whole number, got a table"),
    ("train.rounds=0", "in [train]: rounds must be 1 or more, got 0"),
    ("train.rounds=1.5", "'train.rounds' cannot be 1.5: expected a whole number, got a number"),
    ("train.rounds=1e400", "'train.rounds' cannot be inf: expected a whole number, got a number"),
    ("train.rounds=nan", "'train.rounds' cannot be nan: expected a whole number, got a number"),
    ('train.rounds="ten"', "'train.rounds' cannot be 'ten': expected a whole number, got text"),
    (
        "train.rounds=true",
        "'train.rounds' cannot be True: expected a whole number, got true or false",
    ),
    ("train.rounds=[1,2]", "'train.rounds' cannot be [1, 2]: expected a whole number, got a list"),
    (
        "train.rounds=99999999999999999999",
        "in [train]: rounds must be at most 2147483647, got",
    ),
    ("train.rounds=١٢", "'train.rounds' cannot be '١٢': expected a whole number, got text"),
    ("train.round=5", "unknown key 'train.round': did you mean 'rounds'?"),
    ("train.learning_rate=0", "in [train]: learning_rate must be a finite number above 0, got"),
    ("train.learning_rate=-1", "in [train]: learning_rate must be a finite number above 0, got"),
    ("train.learning_rate=nan", "in [train]: learning_rate must be a finite number above 0, got"),
    ("train.learning_rate=inf", "in [train]: learning_rate must be a finite number above 0, got"),
    ("train.learning_rate=fast", "'train.learning_rate' cannot be 'fast': expected a number, got"),
    ("train.learning_rate=1e300", "1 of 1 runs diverged (balanced-reservoir-seed0): lower"),
    ("train.epochs=0", "in [train]: epochs must be 1 or more, got 0"),
    ("train.participation=0", "in [train]: participation must be above 0 and at most 1, got 0.0"),
    ("train.participation=2", "in [train]: participation must be above 0 and at most 1, got 2.0"),
    ("train.participation=nan", "in [train]: participation must be above 0 and at most 1, got nan"),
    ("train.dropout=1", "in [train]: dropout must be at least 0 and below 1, got 1.0"),
    ("train.dropout=-0.1", "in [train]: dropout must be at least 0 and below 1, got -0.1"),
    ("train.batch_size=0", "in [train]: batch_size must be 1 or more, got 0"),
    ("train.decay=-1", "in [train]: decay must be above 0 and at most 1, got -1.0"),
    ("storage.capacity=0", "in [storage]: capacity must be 1 or more, got 0"),
    (
        "storage.capacity=2.5",
        "'storage.capacity' cannot be 2.5: expected a whole number or a list, got",
    ),
    (
        'storage.capacity="many"',
        "'storage.capacity' cannot be 'many': expected a whole number or a list,",
    ),
    (
        "storage.capacity=99999999999999999999",
        "in [storage]: capacity must be at most 2147483647, got",
    ),
    ("storage.capacity=[1,2]", "has 2 numbers for 4 devices: give one for each"),
    ("storage.capacities=[1]", "unknown key 'storage.capacities': did you mean 'capacity'?"),
    ("storage.after_use=eat", "'storage.after_use' cannot be 'eat': known are: discount,"),
    ("storage.quotas=all", "'storage.quotas' cannot be 'all': known are: hard, soft"),
    ("policy=fifo", "'policy' must be a table, got 'fifo'"),
    ("policy.name=fifoo", "unknown policy 'fifoo': did you mean 'fifo'?"),
    ("policy.name=5", "'policy.name' must be a string"),
    ("policy.name=nomodule:Policy", "cannot import 'nomodule' (of 'nomodule:Policy'): No module"),
    (
        "policy.name=policies.py:NoScore",
        "policies.py:NoScore is no policy, it lacks a method: score",
    ),
    ("policy.name=policies.py:Plain", "policies.py:Plain is no policy: it must be a subclass of"),
    (
        "policy.name=policies.py:Needs",
        "policies.py:Needs is no dataclass: put @dataclass(frozen=True)",
    ),
    (
        "policy.name=policies.py:Gone",
        "'policies.py' has no 'Gone': known are: Needs, NoScore, Plain,",
    ),
    ("policy.name=syntax.py:P", "cannot import 'syntax.py': invalid syntax in line 1"),
    (
        "policy.name=failing.py:P",
        "cannot import 'failing.py' (of 'failing.py:P'): division by zero",
    ),
    ("policy.name=quits.py:P", "cannot import 'quits.py' (of 'quits.py:P'): it ends the process"),
    ("policy.size=3", "unknown key 'policy.size': there are none"),
    ("policy.name=ode-paper", "unknown policy 'ode-paper': known are: balanced-reservoir,"),
    ("task=demo", "'task' must be a table, got 'demo'"),
    ("task.name=demoo", "unknown task 'demoo': did you mean 'demo'?"),
    ("task.name=custom", "unknown key 'task.devices': did you mean 'device'?"),
    ("task.devices=0", "in [task]: devices must be 1 or more, got 0"),
    ("task.devices=1000000000000", "not enough memory: Unable to allocate"),
    ("task.devices=2.5", "'task.devices' cannot be 2.5: expected a whole number, got a number"),
    ("task.colour=red", "unknown key 'task.colour': known are: clusters, devices,"),
    ("task.labels=1", "in [task]: labels must be 2 or more, got 1"),
    ("seed=-1", "'seed' must be a whole number of at least 0, got -1"),
    ("seed=1.5", "'seed' must be a whole number of at least 0, got 1.5"),
    ("seed=[1,2]", "'seed' must be a whole number of at least 0, got [1, 2]"),
    ("preset=papers", "unknown preset 'papers': did you mean 'paper'?"),
    ("preset=5", "unknown preset '5': known are: authors, default, paper"),
    ('label=""', "'label' must be a name of printable characters, got ''"),
    ("label=5", "'label' must be a name of printable characters, got 5"),
    ('label="a\\u0000b"', "'label' must be a name of printable characters, got 'a\\x00b'"),
    ("model=5", "'model' must be a table, got 5"),
    ("model.name=lenett", "unknown model 'lenett': did you mean 'lenet'?"),
    ("model.name=nets.py:f", "there is no file nets.py"),
    ("model.last_layers=99", "last_layers must be between 1 and 1, got 99"),
    ("model.hidden=[0]", "model 'softmax' has no option 'hidden'"),
    ("gist.mode=all", "'gist.mode' cannot be 'all': known are: local, none, shared"),
    ("gist.max_ess=-1", "in [gist]: max_ess must be 1 or more, got -1.0"),
    ("gist.colour=1", "unknown key 'gist.colour': known are: drift_weight, encoding,"),
    ("estimator.name=none", "'estimator.name' cannot be 'none': known are: exact,"),
    ("estimator.max_age=0", "in [estimator]: max_age must be 1 or more, got 0"),
    ("coordinator.name=greed", "unknown coordinator 'greed': did you mean 'greedy'?"),
    (
        "coordinator.clients_per_label=0",
        "in [coordinator]: clients_per_label must be 1 or more, got 0",
    ),
    ("regions=label", "'regions' must be a table, got 'label'"),
    ("regions.name=cube", "'regions.name' cannot be 'cube': known are: label"),
    ("aggregation=5", "'aggregation' must be a table, got 5"),
    ("aggregation.name=mean", "unknown aggregation 'mean': did you mean 'median'?"),
    ("limits.update_norm=-1", "in [limits]: update_norm must be above 0, got -1.0"),
    (
        "limits.enabled=maybe",
        "'limits.enabled' cannot be 'maybe': expected true or false, got text",
    ),
    ("privacy.epsilon=-1", "in [privacy]: epsilon must be a finite number above 0, got -1.0"),
    ("privacy.delta=2", "in [privacy]: delta must be above 0 and below 1, got 2.0"),
    ("privacy.sum_threshold=3", "'privacy.sum_threshold' is for deployed devices: remove it from"),
    ("privacy.profiles=open", "'privacy.profiles' cannot be 'open': known are: homomorphic,"),
    ("record.every=0", "in [record]: every must be 1 or more, got 0"),
    ("record.accuracy=mean", "'record.accuracy' cannot be 'mean': known are: devices, pooled"),
    ("stream.drift=2", "in [stream]: drift must be between 0 and 1, got 2.0"),
    (
        "stream.shuffle=5",
        "'stream.shuffle' cannot be 5: expected true or false, got a whole number",
    ),
    ("correction.name=adam", "'correction.name' cannot be 'adam': known are: fedvarp,"),
    (
        "weights.client_label=five",
        "'weights.client_label' cannot be 'five': expected a number, got",
    ),
    ("profile.every=0", "in [profile]: every must be 1 or more, got 0"),
    ("sweep=5", "'sweep' must be a table of lists, got 5"),
    ("sweep.seed=[]", "'sweep.seed' must be a list of one or more values, got []"),
    ("sweep.seed=5", "'sweep.seed' must be a list of one or more values, got 5"),
    ("sweep.seed=[0,0]", "two runs would both be called 'balanced-reservoir-seed0': give"),
    ('sweep.seed=["a"]', "'seed' must be a whole number of at least 0, got 'a'"),
    ("sweep.train.rounds=[0]", "in [train]: rounds must be 1 or more, got 0"),
    ("sweep.nothing=[1]", "unknown key 'nothing': known are: aggregation, coordinator,"),
    ("methods=5", "'methods' must be a list of names, such as [\"fifo\"], or tables, got 5"),
    ("methods=[]", "'methods' must be one or more different names, got []"),
    ('methods=["fifo","fifo"]', "'methods' must be one or more different names, got ['fifo',"),
    ('methods=["fifooo"]', "unknown method 'fifooo': did you mean 'fifo'?"),
    ("methods.a=5", "'methods.a' must be a table of what differs, got 5"),
    (
        "methods.a.storage.capacity=0",
        "in [storage]: capacity must be 1 or more, got 0",
    ),
    ("\u017feed=1", "unknown key '\u017feed': did you mean 'seed'?"),
]
COMMANDS = [
    ("nothing", "No such command 'nothing'."),
    ("--nothing", "No such option '--nothing'."),
    ("run", "Missing argument 'FILE'."),
    ("run good.toml x", "Got unexpected extra argument (x)"),
    ("run missing.toml", "there is no file missing.toml"),
    ("run folder.toml", "cannot read folder.toml: Is a directory"),
    ("run binary.toml", "binary.toml is not text in UTF-8: save it as such"),
    ("run utf16.toml", "utf16.toml is not text in UTF-8: save it as such"),
    ("run empty.toml", "'task.name' is missing"),
    ("run broken.toml", "broken.toml is not valid TOML: Invalid initial character for a"),
    ("run dupe.toml", "dupe.toml is not valid TOML: Cannot overwrite a value (at line"),
    ("run selfbase.toml", "selfbase.toml is its own base: take it out of the files named"),
    ("run nobase.toml", "there is no file missing.toml"),
    ("run numbase.toml", "'base' in numbase.toml must be the name of a file, got 5"),
    ("run deep.toml", "deep.toml nests deeper than any configuration does"),
    ("run good.csv", "good.csv is not valid TOML: Expected '=' after a key in a"),
    ("run good.toml --jobs 0", "Invalid value for '--jobs': 0 is not in the range x>=1."),
    ("run good.toml --jobs two", "Invalid value for '--jobs': 'two' is not a valid integer range."),
    ("run good.toml --backend gpu", "--backend takes local or ray, got 'gpu'"),
    (
        "run good.toml --out good.csv",
        "cannot keep records in good.csv: File exists; choose another",
    ),
    (
        "run good.toml --out good.csv/x",
        "cannot keep records in good.csv/x: Not a directory; choose",
    ),
    ("run good.toml --set nonsense", "--set takes key=value, got 'nonsense'"),
    ("run good.toml --set =5", "--set takes key=value, got '=5'"),
    ("run good.toml --set a.b.c=1", "unknown key 'a': known are: aggregation, coordinator,"),
    ("run good.toml --set .=5", "'.' is no key: write it as table.key"),
    ("plan p_bigcap.json", "p_bigcap.json: device 0: capacity must be a whole number of at"),
    ("plan p_bool.json", "p_bool.json: Expected `int`, got `bool` - at `$.capacity[0]`;"),
    ("plan p_cut.json", "p_cut.json: is not valid JSON: Expecting ',' delimiter: line 1"),
    ("plan p_dupe.json", "p_dupe.json: the key 'capacity' is there 2 times"),
    ("plan p_empty.csv", "p_empty.csv: the first line must be 'device,capacity' and one"),
    ("plan p_emptyfleet.json", "p_emptyfleet.json: there is no device in it"),
    ("plan p_extra.json", "p_extra.json: Object contains unknown field `speed`; the keys"),
    ("plan p_frac.csv", "p_frac.csv: device a: capacity must be a whole number of at"),
    ("plan p_head.csv", "p_head.csv: the first line must be 'device,capacity' and one"),
    ("plan p_hugecap.json", "p_hugecap.json: Expected `int`, got `float` - at"),
    ("plan p_labeltwice.csv", "p_labeltwice.csv: label 'x' is there twice"),
    ("plan p_list.json", "p_list.json: Expected `object`, got `array`; the keys are"),
    ("plan p_minus.json", "p_minus.json: device 0: velocities must be finite numbers of at"),
    ("plan p_nan.json", "p_nan.json: device 0: velocities must be finite numbers of at"),
    ("plan p_nocap.json", "p_nocap.json: Object missing required field `capacity`; the"),
    ("plan p_noname.csv", "p_noname.csv: a device has no name"),
    ("plan p_norow.csv", "p_norow.csv: there is no device in it"),
    ("plan p_ragged.csv", "p_ragged.csv: device a has 1 velocities, but there are 2 labels"),
    ("plan p_short.json", "p_short.json: 1 capacities but 2 rows of velocity; each device"),
    ("plan p_text.csv", "p_text.csv: device a: 'fast' is not a number"),
    ("plan p_text.json", "p_text.json: Expected `int`, got `str` - at `$.capacity[0]`;"),
    ("plan p_twice.csv", "p_twice.csv: device 'a' is there twice"),
    ("plan p_wide.json", "p_wide.json: device 1 has 2 velocities, but there are 1 labels"),
    ("plan p_zerocap.json", "p_zerocap.json: device 0: capacity must be a whole number of at"),
    ("plan folder.json", "folder.json: cannot be read: Is a directory"),
    ("plan binary.json", "binary.json: is not UTF-8 text"),
    ("plan missing.json", "missing.json: cannot be read: No such file or directory"),
    ("plan data.txt", "data.txt: profiles are read from a .json or .csv file,"),
    ("plan good.csv", "good.csv: the first line must be 'device,capacity' and one"),
    ("plan empty.toml", "'task.name' is missing"),
    ("plan good.toml", "no run of good.toml divides labels among devices: nothing to"),
    ("plan fleet.json --clients-per-label 0", "clients_per_label must be 1 or more, got 0"),
    ("plan fleet.json --clients-per-label -1", "clients_per_label must be 1 or more, got -1"),
    ("plan fleet.json --labels-per-client 0", "labels_per_client must be 1 or more, got 0"),
    (
        "plan fleet.json --quantities odd",
        "Invalid value for '--quantities': 'odd' is not one of 'even',",
    ),
    (
        "plan fleet.json --clients-per-label x",
        "Invalid value for '--clients-per-label': 'x' is not a valid",
    ),
    (
        "plan fleet.json --clients-per-label 99999999999999999999",
        "Invalid value for '--clients-per-label': 99999999999999999999",
    ),
    (
        "plan good.toml --clients-per-label 2",
        "good.toml says itself how to plan: change its [coordinator]",
    ),
    ("report missing", "missing is not a directory; give the one that `fedkeep run"),
    ("report good.csv", "good.csv is not a directory; give the one that `fedkeep run"),
    ("report emptydir", "no runs in emptydir: it holds no .jsonl file that `fedkeep run`"),
    ("report norun", "no runs in norun: it holds no .jsonl file that `fedkeep run`"),
    ("report emptyrun", "no runs in emptyrun: it holds no .jsonl file that `fedkeep run`"),
    ("report jsonrun", "no runs in jsonrun: it holds no .jsonl file that `fedkeep run`"),
    ("report listrun", "no runs in listrun: it holds no .jsonl file that `fedkeep run`"),
    ("report r0 --html emptydir", "cannot write emptydir: Is a directory"),
    ("report r0 --html no/such/x.html", "cannot write no/such/x.html: No such file or directory"),
    ("report r0 --markdown emptydir", "cannot write emptydir: Is a directory"),
    ("report r0 --csv no/x", "cannot write no/x: No such file or directory"),
    ("report r0 --json emptydir", "cannot write emptydir: Is a directory"),
    ("report r0 --latex emptydir", "cannot write emptydir: Is a directory"),
    ("report r0 --figure x.gif", "a figure is a .pdf, .svg or .png file, got x.gif"),
    ("report r0 --figure no/x.pdf", "cannot write no/x.pdf: No such file or directory"),
    ("report r0 --figure emptydir", "a figure is a .pdf, .svg or .png file, got emptydir"),
    ("report r0 --against odee", "no run of a method 'odee' to compare with: known are:"),
    (["report", "r0", "--against", ""], "no run of a method '' to compare with: known are:"),
    ("watch missing", "missing is not a directory; give the one that `fedkeep run"),
    ("watch good.csv", "good.csv is not a directory; give the one that `fedkeep run"),
    ("watch ftp://x", "ftp:/x is not a directory; give the one that `fedkeep run"),
    ("watch http://", "http:// is not an address; give one such as"),
    ("watch http://127.0.0.1:1", "cannot reach http://127.0.0.1:1: [Errno 111] Connection refused"),
    ("watch emptydir --port 99999", "Invalid value for '--port': 99999 is not in the range"),
    ("watch emptydir --port -1", "Invalid value for '--port': -1 is not in the range 0<=x<=65535."),
    (
        "watch emptydir --host nosuchhost.invalid",
        "others can reach nosuchhost.invalid: set a secret of your own",
    ),
    ("watch emptydir --host 0.0.0.0", "others can reach 0.0.0.0: set a secret of your own with"),
    (
        "watch emptydir --host 256.1.1.1",
        "others can reach 256.1.1.1: set a secret of your own with",
    ),
    ("check x", "unknown policy 'x': known are: balanced-reservoir, central,"),
    ("check fifoo", "unknown policy 'fifoo': did you mean 'fifo'?"),
    ("check :", "':' is not of the form module:name or path/to/file.py:name"),
    ("check policies.py:NoScore", "policies.py:NoScore is no policy, it lacks a method: score"),
    ("check policies.py:Plain", "policies.py:Plain is no policy: it must be a subclass of"),
    ("check policies.py:Needs", "policies.py:Needs is no dataclass: put @dataclass(frozen=True)"),
    ("check quits.py:P", "cannot import 'quits.py' (of 'quits.py:P'): it ends the process"),
    ("check nofile.py:P", "there is no file nofile.py (of 'nofile.py:P')"),
    ("check good.csv:P", "cannot import 'good.csv' (of 'good.csv:P'): No module named"),
    (["check", ""], "unknown policy '': known are: balanced-reservoir, central,"),
    ("export x --out o.onnx", "unknown model 'x': known are: char-gru, char-mlp,"),
    ("export lenet", "Missing option '--out'."),
    ("export nets.py:f --out o.onnx", "there is no file nets.py (of 'nets.py:f')"),
    (
        ["export", "lenet", "--out", "o.onnx", "--shape", ""],
        "the model does not tell the shape of a sample: give it by",
    ),
    (
        "export lenet --out o.onnx --shape 1,2",
        "the model cannot take samples of shape [1, 2] (--shape): Given",
    ),
    (
        "export lenet --out o.onnx --shape 1,28,28 --weights missing",
        "cannot read missing: No such file or directory",
    ),
    (
        "export lenet --out o.onnx --shape 1,28,28 --weights binary.npz",
        "binary.npz is not a safetensors file: Error while deserializing",
    ),
    (
        "export lenet --out o.onnx --shape 1,99999999,99999999",
        "the model cannot take samples of shape [1, 99999999, 99999999]",
    ),
    ("explain nothing", "no table of an experiment is called 'nothing': known are:"),
    (["explain", ""], "no table of an experiment is called '': known are: aggregation,"),
    ("explain storage.capasity", "'storage' has no key 'capasity': did you mean 'capacity'?"),
    ("explain x.y", "no table of an experiment is called 'x': known are:"),
    ("explain .", "no table of an experiment is called '': known are: aggregation,"),
    ("explain policy.name.x", "'policy' has no key 'name.x': known are: choice, clip, restart,"),
    ("explain policies.py:Plain.x", "no table of an experiment is called 'policies': did you mean"),
    ("list nothing", "nothing is called 'nothing': known are: audio-mnist, authors,"),
    (["list", ""], "nothing is called '': known are: audio-mnist, authors,"),
    ("list fifoo", "nothing is called 'fifoo': did you mean 'fifo'?"),
    ("list policies.py:Nope", "'policies.py' has no 'Nope': known are: Needs, NoScore, Plain,"),
    ("list quits.py:x", "cannot import 'quits.py' (of 'quits.py:x'): it ends the process"),
    ("paper tabel2", "unknown experiment 'tabel2': did you mean 'table2'?"),
    ("paper table2", "say on which task with --task: har-balanced,"),
    ("paper table2 --task x", "table2 has no task 'x': known are: har, har-balanced,"),
    ("paper table2 --task st --method nope", "has no method 'nope': known are: default,"),
    ("paper table2 --task st --seed 99", "has no seed 99: it has 0, 1, 2, 3, 4"),
    ("paper table2 --task st --seed x", "Invalid value for '--seed': 'x' is not a valid integer."),
    ("paper table2 --task st --set x", "--set takes key=value, got 'x'"),
    ("paper table2 --task ../st", "table2 has no task '../st': known are: har,"),
    ("paper ../tasks", "unknown experiment '../tasks': known are: ablation, authors,"),
    (
        "paper table2 --task st --set train.rounds=0",
        "in [train]: rounds must be 1 or more, got 0",
    ),
    ("demo --port 70000", "Invalid value for '--port': 70000 is not in the range"),
    ("demo --out good.csv", "cannot keep records in good.csv: File exists; choose another"),
    ("demo --out /proc/x", "cannot keep records in /proc/x: No such file or directory;"),
    ("advise missing.csv", "there is no file missing.csv; a relative path starts at the"),
    ("advise folder.csv", "folder.csv is a folder: name a file in it"),
    ("advise empty.csv", "empty.csv is empty: its first line must name the columns"),
    ("advise binary.csv", "binary.csv is not text in UTF-8: save it as CSV in UTF-8"),
    ("advise good.csv --bytes much", "--bytes takes a size such as 500kB or 2MiB, got 'much'"),
    ("advise good.csv --bytes 0", "0 bytes are too few: a device that stores one sample of this"),
    ("advise good.csv --bytes -5kB", "--bytes takes a size such as 500kB or 2MiB, got '-5kB'"),
    ("advise good.csv --bytes 10", "10 bytes are too few: a device that stores one sample of this"),
    (
        ["advise", "good.csv", "--bytes", "5 bananas"],
        "--bytes takes a size such as 500kB or 2MiB, got '5 bananas'",
    ),
    ("advise good.csv --capacity 0", "Invalid value for '--capacity': 0 is not in the range x>=1."),
    (
        "advise good.csv --participation 0",
        "in [train]: participation must be above 0 and at most 1, got 0.0",
    ),
    (
        "advise good.csv --participation 2",
        "in [train]: participation must be above 0 and at most 1, got 2.0",
    ),
    (
        "advise good.csv --participation nan",
        "in [train]: participation must be above 0 and at most 1, got nan",
    ),
    (
        "advise good.csv --minutes 0",
        "Invalid value for '--minutes': 0.0 is not in the range x>=0.1.",
    ),
    ("advise good.csv --minutes nan", "minutes must be a finite number above 0, got nan"),
    ("advise good.csv --drift 2", "Invalid value for '--drift': 2.0 is not in the range"),
    (
        "advise good.csv --device machine",
        "good.csv has no column 'machine'; it has device, label,",
    ),
    (
        "advise good.csv --label class",
        "good.csv has no column 'class'; it has device, label, a,",
    ),
    (
        "advise good.csv --time when",
        "good.csv has no column 'when'; it has device, label, a,",
    ),
    (
        "advise good.csv --time label",
        "good.csv: device, label and time must be different columns, got",
    ),
    (
        "advise good.csv --device label",
        "good.csv: device, label and time must be different columns, got",
    ),
    ("advise good.csv --devices 1", "Invalid value for '--devices': 1 is not in the range x>=2."),
    (
        "advise good.csv --model lenett",
        "unknown model 'lenett': did you mean 'lenet'?; your own is",
    ),
    (
        "advise good.csv --model lenet",
        "model 'lenet' cannot take samples of shape [2]: Expected 3D",
    ),
    ("advise good.csv --model nets.py:f", "there is no file nets.py (of 'nets.py:f')"),
    ("advise good.csv --backend cloud", "--backend takes local or ray, got 'cloud'"),
    (
        "advise good.csv --out good.npz",
        "cannot keep records in good.npz: File exists; choose another",
    ),
    ("advise good.csv --jobs 0", "Invalid value for '--jobs': 0 is not in the range x>=1."),
    ("advise onelabel.csv", "onelabel.csv has a single label, 'ok': there is nothing to tell"),
    ("advise three.csv", "three.csv leaves 1 samples for testing, too few to tell methods"),
    ("advise text.csv", "text.csv, line 62: a is 'warm', which is no number: leave the"),
    ("advise sources.py:broken", "sources.py:broken raised KeyError: 'pump' (sources.py,"),
    ("advise sources.py:nope", "'sources.py' has no 'nope': known are: broken, empty, needs,"),
    ("advise quits.py:f", "cannot import 'quits.py' (of 'quits.py:f'): it ends the process"),
    ("advise nod.npz", "nod.npz has no 'device' to say whose a sample is: add it, set"),
    (
        "advise good.csv --devices 100000",
        "60 samples cannot give 100000 devices 2 each; lower devices",
    ),
    (
        "advise good.csv --capacity 99999999999999999999",
        "in [storage]: capacity must be at most 2147483647, got",
    ),
    ("agent run nowhere.toml", "there is no file nowhere.toml"),
    ("agent run folder.toml", "cannot read folder.toml: Is a directory"),
    ("agent run binary.toml", "binary.toml is not text in UTF-8: save it as such"),
    ("agent run empty.toml", "'samples.shape' is missing"),
    ("agent run good.toml", "unknown table 'task': known are: agent, drift, estimator, gist,"),
    ("agent status", "no agent answers at fedkeep.sock (No such file or directory):"),
    (
        "agent status --socket good.csv",
        "no agent answers at good.csv (Connection refused): start one by",
    ),
    ("agent show --socket nope", "no agent answers at nope (No such file or directory): start one"),
    ("agent refused", "no agent answers at fedkeep.sock (No such file or directory):"),
    ("agent why x", "no agent answers at fedkeep.sock (No such file or directory):"),
    ("agent why", "Missing argument 'ID'."),
    ("agent erase", "say what to erase: --id, --label, --source, --since or --until"),
    ("agent erase --namespace a", "--namespace says which --id is meant: give that, too, or"),
    (
        "agent erase --since yesterday",
        "Invalid value for '--since': 'yesterday' does not match the",
    ),
    ("agent erase --id 5", "no agent answers at fedkeep.sock (No such file or directory):"),
    ("agent store check missing", "there is no file missing"),
    ("agent store check emptydir", "emptydir is not a file"),
    (
        "agent store check random.store",
        "random.store is not a store of fedkeep: left untouched; set",
    ),
    ("agent store check empty.store", "empty.store is not a store of fedkeep: left untouched; set"),
    ("agent store check zeros.store", "zeros.store is not a store of fedkeep: left untouched; set"),
    (
        "agent store check good.csv",
        "good.csv is not a store of fedkeep: left untouched; set [store]",
    ),
    ("agent store repair missing", "there is no file missing"),
    ("agent store repair emptydir", "emptydir is not a file"),
    (
        "agent store repair random.store",
        "random.store is not a store of fedkeep: left untouched; set",
    ),
    (
        "agent store repair empty.store",
        "empty.store is not a store of fedkeep: left untouched; set",
    ),
    (
        "agent store repair zeros.store",
        "zeros.store is not a store of fedkeep: left untouched; set",
    ),
    (
        "agent store repair good.csv",
        "good.csv is not a store of fedkeep: left untouched; set [store]",
    ),
    ("agent store show missing", "there is no file missing"),
    ("agent store show emptydir", "emptydir is not a file"),
    (
        "agent store show random.store",
        "random.store is not a store of fedkeep: left untouched; set",
    ),
    ("agent store show empty.store", "empty.store is not a store of fedkeep: left untouched; set"),
    ("agent store show zeros.store", "zeros.store is not a store of fedkeep: left untouched; set"),
    (
        "agent store show good.csv",
        "good.csv is not a store of fedkeep: left untouched; set [store]",
    ),
    ("agent store export missing o.npz", "there is no file missing"),
    (
        "agent store export random.store o.npz",
        "random.store is not a store of fedkeep: left untouched; set",
    ),
    ("agent store rekey missing --plain", "there is no file missing"),
    (
        "agent store rekey random.store",
        "say what it is to be: --new-key-file, --new-key-env or --plain",
    ),
    (
        "agent store rekey random.store --plain",
        "random.store is not a store of fedkeep: left untouched;",
    ),
    (
        "agent store check random.store --key-file missing",
        "the store's key cannot be read from missing: No such file or",
    ),
    (
        "agent store check random.store --key-file key.short",
        "key.short can be read by everybody: `chmod 600 key.short` first",
    ),
    (
        "agent store check random.store --key-env NOPE",
        "the environment variable NOPE holds no key: write 64 hex digits",
    ),
    (
        "agent store show random.store --limit -1",
        "Invalid value for '--limit': -1 is not in the range x>=0.",
    ),
    ("provision good.csv", "good.csv/nodes: Not a directory"),
    ("provision /proc/x", "/proc/x: No such file or directory"),
    ("provision keys --nodes 0", "Invalid value for '--nodes': 0 is not in the range x>=1."),
    ("provision keys --port 0", "Invalid value for '--port': 0 is not in the range 1<=x<=65535."),
    ("provision keys --days 0", "Invalid value for '--days': 0 is not in the range x>=1."),
    (
        ["provision", "keys2", "--host", ""],
        "a host is a name or an address such as fleet.example, got ''",
    ),
    (
        ["provision", "keys3", "--host", "not a host!"],
        "a host is a name or an address such as fleet.example, got 'not",
    ),
    (
        "provision keys4 --days 99999999",
        "certificates can be valid for at most 36500 days, got 99999999",
    ),
    (
        "serve missing.toml --credentials creds",
        "Invalid value for 'APP': Path 'missing.toml' does not exist.",
    ),
    (
        "serve fleetx.toml --credentials creds",
        "Invalid value for 'APP': Path 'fleetx.toml' does not exist.",
    ),
    (
        "serve good.csv --credentials creds",
        "good.csv is not valid TOML: Expected '=' after a key in a",
    ),
    ("serve noapp --credentials creds", "there is no file noapp/pyproject.toml"),
    (
        "serve badapp --credentials creds",
        "badapp/pyproject.toml is not valid TOML: Expected ']' at the",
    ),
    ("serve emptydir --credentials creds", "there is no file emptydir/pyproject.toml"),
    ("serve binary.toml --credentials creds", "binary.toml is not text in UTF-8: save it as such"),
    ("serve empty.toml --credentials creds", "'samples.shape' is missing"),
    ("serve good.toml", "Missing option '--credentials'."),
    (
        "serve good.toml --credentials nokeys",
        "there are no credentials in nokeys: run `fedkeep provision",
    ),
    (
        "serve good.toml --credentials creds --insecure --bind 0.0.0.0",
        "--insecure is for loopback only, and 0.0.0.0 is not: run",
    ),
    ("serve good.toml --credentials creds --set x", "--set takes key=value, got 'x'"),
    (
        "serve good.toml --credentials creds --port 0",
        "Invalid value for '--port': 0 is not in the range 1<=x<=65535.",
    ),
    ("fleet start missing", "there is no file missing/fleet.toml"),
    ("fleet start emptydir", "there is no file emptydir/fleet.toml"),
    ("fleet start good.csv", "cannot read good.csv/fleet.toml: Not a directory"),
    ("fleet status missing", "there is no fleet in missing: run `fedkeep fleet init"),
    ("fleet status emptydir", "there is no fleet in emptydir: run `fedkeep fleet init"),
    ("fleet status good.csv", "there is no fleet in good.csv: run `fedkeep fleet init"),
    ("fleet stop missing", "there is no fleet in missing: run `fedkeep fleet init"),
    ("fleet stop emptydir", "there is no fleet in emptydir: run `fedkeep fleet init"),
    ("fleet stop good.csv", "there is no fleet in good.csv: run `fedkeep fleet init"),
    ("fleet reset missing", "there is no fleet in missing: run `fedkeep fleet init"),
    ("fleet reset emptydir", "there is no fleet in emptydir: run `fedkeep fleet init"),
    ("fleet reset good.csv", "there is no fleet in good.csv: run `fedkeep fleet init"),
    ("fleet init good.csv", "good.csv/nodes: Not a directory"),
    ("fleet init f1 --devices 1", "Invalid value for '--devices': 1 is not in the range 2<=x<=50."),
    (
        "fleet init f1 --devices 99",
        "Invalid value for '--devices': 99 is not in the range 2<=x<=50.",
    ),
    ("fleet start f2 --port 0", "Invalid value for '--port': 0 is not in the range 1<=x<=65535."),
    ("fleet start f2", "f2/fleet.toml is not valid TOML: Invalid initial character"),
    ("keyholder create good.csv", "good.csv: File exists"),
    ("keyholder create /proc/x", "/proc/x: No such file or directory"),
    ("keyholder show missing", "lost key: missing/secret.key is not there: put it back, or make"),
    ("keyholder show emptydir", "lost key: emptydir/secret.key is not there: put it back, or"),
    ("keyholder show good.csv", "good.csv/secret.key: Not a directory"),
    (
        "keyholder serve missing --insecure",
        "lost key: missing/secret.key is not there: put it back, or make",
    ),
    ("keyholder serve emptydir", "say --credentials DIR, or --insecure on loopback, and not both"),
    (
        "keyholder serve emptydir --credentials nokeys",
        "nokeys/ca.crt is not there: run `fedkeep provision DIR",
    ),
    (
        "keyholder serve emptydir --insecure --credentials x",
        "say --credentials DIR, or --insecure on loopback, and not both",
    ),
    ("keyholder create kh", "kh has a key already, and nothing could replace it: name"),
    (
        "keyholder serve kh --insecure --listen nowhere",
        "an address is written HOST:PORT, not 'nowhere'",
    ),
    (
        "keyholder serve kh --insecure --listen 0.0.0.0:0",
        "--insecure is for loopback only, and 0.0.0.0 is not: run",
    ),
    (
        "keyholder serve kh --insecure --listen 127.0.0.1:99999",
        "an address is written HOST:PORT, not '127.0.0.1:99999'",
    ),
    (
        "keyholder serve kh --insecure --listen 127.0.0.1:x",
        "an address is written HOST:PORT, not '127.0.0.1:x'",
    ),
    (
        "keyholder serve kh --insecure --least-devices 0",
        "Invalid value for '--least-devices': 0 is not in the range x>=1.",
    ),
    (
        "keyholder serve kh --credentials emptydir",
        "emptydir/ca.crt is not there: run `fedkeep provision DIR",
    ),
]
AGENTS = [
    ("shape = [3], ", "", "'samples.shape' is missing"),
    ("[3]", "[0]", "in [samples]: shape must be one or more positive numbers, got"),
    ("[3]", "[-3]", "in [samples]: shape must be one or more positive numbers, got"),
    ("[3]", "[99999999999]", "in [samples]: shape must make at most 268435456 numbers, got"),
    ("[3]", '"3"', "'samples.shape' cannot be '3': expected a list, got text"),
    ("[3]", "[]", "in [samples]: shape must be one or more positive numbers, got []"),
    (", labels = 2", "", "in [samples]: labels is missing: give their number, or"),
    ("labels = 2", "labels = 0", "in [samples]: labels must be between 1 and 16777216, got 0"),
    (
        "labels = 2",
        "labels = 999999999999",
        "in [samples]: labels must be between 1 and 16777216, got",
    ),
    (
        "labels = 2",
        'labels = 2, names = ["a"]',
        "in [samples]: names must be 2 different ones, one for each",
    ),
    (
        "labels = 2",
        'labels = 2, names = ["a","a"]',
        "in [samples]: names must be 2 different ones, one for each",
    ),
    (
        "labels = 2",
        'labels = 2, names = ["a",""]',
        "in [samples]: names must not hold an empty one",
    ),
    (
        "labels = 2",
        'labels = 2, dtype = "float8"',
        "'samples.dtype' cannot be 'float8': did you mean 'float64'?",
    ),
    ("labels = 2", "labels = 2, limit = 0", "in [samples]: limit must be above 0, got 0.0"),
    ("150_000", "0", "in [store]: budget must be 32768 or more, got 0"),
    ("150_000", "100", "in [store]: budget must be 32768 or more, got 100"),
    ("150_000", "-1", "in [store]: budget must be 32768 or more, got -1"),
    ("150_000", "9223372036854775807", "no room for the 9223372036854771712 bytes of"),
    ("150_000", '"150kB"', "'store.budget' cannot be '150kB': expected a whole number, got text"),
    ("a.store", "emptydir", "is not a file: left untouched; set [store] path to another"),
    ("a.store", "no/such/a.store", "cannot be used as a store: No such file or directory; set"),
    ("a.store", "random.store", "is not a store of fedkeep: left untouched; set [store] path to"),
    ("a.store", "/proc/a.store", "/proc/a.store cannot be used as a store: No such file or"),
    (
        "150_000",
        '150_000, encoding = "zip"',
        "'store.encoding' cannot be 'zip': invalid enum value 'zip'",
    ),
    (
        "150_000",
        "150_000, commit_every = 0",
        "unknown key 'store.commit_every': did you mean 'commit_ms'?",
    ),
    (
        "150_000",
        '150_000, key_file = "key.short"',
        "key.short can be read by everybody: `chmod 600 key.short` first",
    ),
    (
        "150_000",
        '150_000, key_file = "nokey"',
        "the store's key cannot be read from nokey: No such file or",
    ),
    (
        "150_000",
        '150_000, key_env = "NO_SUCH"',
        "the environment variable NO_SUCH holds no key: write 64 hex",
    ),
    (
        "150_000",
        '150_000, key_file = "notkey", key_env = "HOME"',
        "in [store]: key_file and key_env must not both be set",
    ),
    ('"a.sock"', '"a.sock", nice = 99', "in [agent]: nice must be between 0 and 19, got 99"),
    (
        '"a.sock"',
        '"a.sock", cpu_cap = 2',
        "in [agent]: cpu_cap must be above 0 and at most 1, got 2.0",
    ),
    ('"a.sock"', '"a.sock", queue = 0', "in [agent]: queue must be between 1 and 1048576, got 0"),
    ('"lines"', '"radio"', "unknown kind of source 'radio': known are: folder, http,"),
    (
        '[{ kind = "lines" }]',
        '{ kind = "lines" }',
        "sources are written as [[source]], with two brackets",
    ),
    (
        '[{ kind = "lines" }]',
        '[{ kind = "lines" }, { kind = "lines" }]',
        "two sources are called 'lines': give each [[source]] a name of",
    ),
    (
        '"lines"',
        '"file", path = "missing.csv"',
        "unknown kind of source 'file': did you mean 'folder'?",
    ),
    (
        '"lines"',
        '"lines", colour = "red"',
        "unknown key 'source[0].colour': known are: fields, format,",
    ),
    ('"lines"', '"mqtt"', "'source[0].topic' is missing"),
    (
        '"lines"',
        '"mqtt", host="x", port = 99999, topic = "a"',
        "in [source[0]]: port must be between 1 and 65535, got 99999",
    ),
    (
        '"lines"',
        '"sources.py:thing"',
        "'source[0].kind' = 'sources.py:thing' is not a dataclass under",
    ),
    ('"softmax"', '"lenett"', "unknown model 'lenett': did you mean 'lenet'?; your own is"),
    (
        'name = "softmax"',
        'path = "missing.onnx"',
        "cannot read the model missing.onnx: No such file or directory",
    ),
    ('name = "softmax"', 'path = "binary.npz"', "this is not an ONNX file: wire type 7"),
    ('name = "softmax"', 'path = "emptydir"', "cannot read the model emptydir: Is a directory"),
    (
        'name = "softmax"',
        'name = "softmax", colour = 1',
        "model 'softmax' has no option 'colour': it takes none",
    ),
    ('"softmax"', '"lenet"', "model 'lenet' cannot take samples of shape [3]: Expected 3D"),
    ("source = ", "stor = 1\nsource = ", "unknown table 'stor': did you mean 'store'?"),
    (
        "source = ",
        'policy = { name = "fifoo" }\nsource = ',
        "unknown policy 'fifoo': did you mean 'fifo'?",
    ),
    (
        "source = ",
        'policy = { name = "full-data" }\nsource = ',
        "policy 'full-data' keeps everything, which no budget of bytes",
    ),
    (
        "source = ",
        "storage = { capacity = 5 }\nsource = ",
        "'storage.capacity' is an experiment's: an agent keeps what",
    ),
    (
        "source = ",
        'gist = { mode = "al" }\nsource = ',
        "'gist.mode' cannot be 'al': known are: local, none, shared",
    ),
    (
        "source = ",
        "privacy = { epsilon = -1 }\nsource = ",
        "in [privacy]: epsilon must be a finite number above 0, got -1.0",
    ),
    (
        "source = ",
        'privacy = { profiles = "homomorphic" }\nsource = ',
        "privacy.profiles = 'homomorphic' is for `fedkeep run`: set",
    ),
    (
        "source = ",
        'privacy = { profiles = "sealed" }\nsource = ',
        "sealed profiles need privacy.public_key: the key-holder's, as",
    ),
    (
        "source = ",
        'privacy = { profiles = "sealed", public_key = "zz" }\nsource = ',
        "privacy.public_key must be 64 hexadecimal digits, got 'zz'",
    ),
    (
        "source = ",
        "metrics = { port = 99999 }\nsource = ",
        "in [metrics]: port must be between 0 and 65535, got 99999",
    ),
    ("source = ", 'preset = "papers"\nsource = ', "unknown preset 'papers': did you mean 'paper'?"),
    (
        "source = ",
        "train = { rounds = 5 }\nsource = ",
        "unknown table 'train': known are: agent, drift, estimator, gist,",
    ),
    (
        "source = ",
        "estimator = { max_age = 5 }\nsource = ",
        "'estimator.max_age' is the server's: set it in fleet.toml",
    ),
    (
        "source = ",
        "samples = { shape = [3], labels = 2 }\nsource = ",
        "is not valid TOML: Cannot overwrite a value",
    ),
    (
        '"a.sock"',
        '"a.sock", held_out = "missing.npz"',
        "must be an npz file with x and y, missing.npz is not",
    ),
    (
        '"a.sock"',
        '"a.sock", held_out = "binary.npz"',
        "must be an npz file with x and y, binary.npz is not",
    ),
    (
        '"a.sock"',
        '"a.sock", held_out = "nox.npz"',
        "must be an npz file with x and y, nox.npz is not",
    ),
    (
        '"a.sock"',
        '"a.sock", held_out = "nofeature.npz"',
        "held_out file nofeature.npz holds unsound samples",
    ),
    ('"a.sock"', '"a.sock", held_out = "held_out_labels.npz"', "holds unsound samples"),
]
FLEETS = [
    ("shape = [3], ", "", "'samples.shape' is missing"),
    (", labels = 2", "", "in [samples]: labels is missing: give their number, or"),
    ("[3]", "[0]", "in [samples]: shape must be one or more positive numbers, got"),
    ("labels = 2", "labels = 0", "in [samples]: labels must be at least 2, got 0: a classifier"),
    ("rounds = 2", "rounds = 0", "in [train]: rounds must be 1 or more, got 0"),
    ('"softmax"', '"lenett"', "unknown model 'lenett': did you mean 'lenet'?; your own is"),
    ('"softmax"', '"lenet"', "model 'lenet' cannot take samples of shape [3]: Expected 3D"),
    (
        "train",
        'task = { name = "demo" }\ntrain',
        "unknown table 'task': known are: aggregation, coordinator,",
    ),
    ("train", "trian = 1\ntrain", "unknown table 'trian': did you mean 'train'?"),
    (
        "train = { rounds = 2 }",
        "train = { rounds = 2 }\nrounds = { colour = 1 }",
        "unknown key 'rounds.colour': known are: deadline,",
    ),
    (
        "train = { rounds = 2 }",
        "train = { rounds = 2 }\nrounds = { deadline = -1 }",
        "in [rounds]: deadline must be above 0, got -1.0",
    ),
    (
        "train = { rounds = 2 }",
        'aggregation = { name = "mean" }',
        "unknown aggregation 'mean': did you mean 'median'?",
    ),
    (
        "train = { rounds = 2 }",
        'regions = { name = "k-means" }',
        "'regions.centroids' is missing: a fleet's devices use the same",
    ),
    (
        "train = { rounds = 2 }",
        "privacy = { epsilon = 0 }",
        "in [privacy]: epsilon must be a finite number above 0, got 0.0",
    ),
    ("train", "sweep = { seed = [1] }\ntrain", "unknown table 'sweep': did you mean 'seed'?"),
    (
        "train",
        'methods = ["fifo"]\ntrain',
        "unknown table 'methods': known are: aggregation, coordinator,",
    ),
    (
        "train = { rounds = 2 }",
        'estimator = { name = "exact" }',
        "estimator 'exact' needs all devices' data in one place: it is",
    ),
    (
        "train = { rounds = 2 }",
        'policy = { name = "full-data" }',
        "policy 'full-data' keeps everything: it is for `fedkeep run`",
    ),
    (
        "train = { rounds = 2 }",
        'correction = { name = "scaffold" }',
        "unknown table 'correction': known are: aggregation,",
    ),
    (
        "train = { rounds = 2 }",
        "train = { participation = 3 }",
        "in [train]: participation must be above 0 and at most 1, got 3.0",
    ),
    (
        "train = { rounds = 2 }",
        "stream = { shuffle = true }",
        "unknown table 'stream': did you mean 'storage'?",
    ),
    (
        "train = { rounds = 2 }",
        "metrics = { port = -1 }",
        "in [metrics]: port must be between 0 and 65535, got -1",
    ),
    (
        "train = { rounds = 2 }",
        "state = { url = 5 }",
        "'state.url' cannot be 5: expected text, got a whole number",
    ),
    (
        "train = { rounds = 2 }",
        "records = { directory = 5 }",
        "'records.directory' cannot be 5: expected text, got a whole number",
    ),
    (
        "train = { rounds = 2 }",
        "storage = { capacity = 5 }",
        "'storage.capacity' is a device's: set it in the agents'",
    ),
]
CALLS = [
    (lambda: compared(X), "without y, x must be a data set of pairs (sample, label), all"),
    (
        lambda: compared(X, Y[:5], D),
        "y must have one value for each of the 60 samples, got shape (5,)",
    ),
    (lambda: compared(X, Y, D[:5]), "device must have one value for each of the 60 samples, got"),
    (
        lambda: compared(X, np.stack([Y, Y], 1), D),
        "the samples: label must be one value a sample, got shape",
    ),
    (lambda: compared([["a"]] * 60, Y, D), "the samples: x must be numbers, got <U1"),
    (
        lambda: compared(np.where(X > 1, np.nan, X), Y, D),
        "the samples, sample 2: a feature is missing, NaN or infinite",
    ),
    (
        lambda: compared(X * 1e300, Y, D),
        "the samples, sample 0: a feature is missing, NaN or infinite",
    ),
    (lambda: compared(X + 1j, Y, D), "the samples: x must be numbers, got complex128"),
    (lambda: compared(X[:0], Y[:0], D[:0]), "there is no sample in the samples"),
    (lambda: compared(X[:, :0], Y, D), "the samples: a sample has no feature, x has shape (60, 0)"),
    (lambda: compared(5, Y, D), "x must be an array with a sample a row, got int"),
    (lambda: compared(None, Y, D), "x must be an array with a sample a row, got NoneType"),
    (lambda: compared("good.csv", Y, D), "x must be an array with a sample a row, got str"),
    (
        lambda: compared([[1], [1, 2]] * 30, Y, D),
        "the samples differ in shape: all must have the same",
    ),
    (lambda: compared({"a": 1}, Y, D), "x must be an array with a sample a row, got dict"),
    (
        lambda: compared(np.array([object()] * 60), Y, D),
        "the samples: x must be numbers, got object",
    ),
    (
        lambda: compared(X, [None] * 60, D),
        "the samples, sample 0: label 'None' is neither a whole number",
    ),
    (
        lambda: compared(X, np.full(60, np.nan), D),
        "the samples, sample 0: label 'nan' is neither a whole number",
    ),
    (
        lambda: compared(X, np.zeros(60, int), D),
        "the samples have a single label, '0': nothing to tell apart",
    ),
    (
        lambda: compared(X, Y, [None] * 60),
        "the samples, sample 0: device 'None' is neither a whole number",
    ),
    (
        lambda: compared(X, Y, D + 0.5),
        "the samples, sample 0: device '0.5' is neither a whole number",
    ),
    (
        lambda: compared(X, Y, D + 2.0**60),
        "the samples, sample 0: device '1.152921504606847e+18' is a",
    ),
    (
        lambda: compared(X, Y, D, time=["yesterday"] * 60),
        "the samples: time must be numbers or dates such as",
    ),
    (
        lambda: compared(X, Y, D, time=[1]),
        "time must have one value for each of the 60 samples, got shape",
    ),
    (
        lambda: compared(X, Y, D, time=np.full(60, np.nan)),
        "the samples, sample 0: time 'nan' is missing",
    ),
    (
        lambda: compared(X, Y, D, test=["maybe"] * 60),
        "the samples, sample 0: test must be 0 or 1, got 'maybe'",
    ),
    (
        lambda: compared(X, Y, D, test=np.ones(60, int)),
        "the samples leave no sample for training: see test=",
    ),
    (
        lambda: compared(X, Y, D, test=np.zeros(60, int)),
        "the samples leave no sample for testing: see test=",
    ),
    (
        lambda: compared(X, Y, D, methods=[]),
        "methods must be one or more different ones: name them with a",
    ),
    (
        lambda: compared(X, Y, D, methods="fifo"),
        'methods must be a list, such as ["fifo", "default"], got \'fifo\'',
    ),
    (
        lambda: compared(X, Y, D, methods=["fifo", "fifo"]),
        "methods must be one or more different ones: name them with a",
    ),
    (lambda: compared(X, Y, D, methods=["fifoo"]), "unknown method 'fifoo': did you mean 'fifo'?"),
    (lambda: compared(X, Y, D, methods=[5]), "int is no method: pass a name, a subclass of"),
    (
        lambda: compared(X, Y, D, methods=[None]),
        "NoneType is no method: pass a name, a subclass of",
    ),
    (
        lambda: compared(X, Y, D, methods=[{}]),
        'the tables of a method need a name: methods={"mine": {...}}',
    ),
    (lambda: compared(X, Y, D, methods={"a": {"policy": 5}}), "'policy' must be a table, got 5"),
    (
        lambda: compared(X, Y, D, methods={"": "fifo"}),
        "'label' must be a name of printable characters, got ''",
    ),
    (
        lambda: compared(X, Y, D, methods=[object]),
        "object is no method: pass a name, a subclass of",
    ),
    (
        lambda: compared(X, Y, D, methods=["nomodule:P"]),
        "cannot import 'nomodule' (of 'nomodule:P'): No module named",
    ),
    (
        lambda: compared(X, Y, D, methods=5),
        'methods must be a list, such as ["fifo", "default"], got 5',
    ),
    (
        lambda: compared(X, Y, D, methods=None),
        'methods must be a list, such as ["fifo", "default"], got None',
    ),
    (lambda: compared(X, Y, D, seeds=0), "seeds must be a whole number of at least 1, got 0"),
    (lambda: compared(X, Y, D, seeds=-1), "seeds must be a whole number of at least 1, got -1"),
    (lambda: compared(X, Y, D, seeds=1.5), "seeds must be a whole number of at least 1, got 1.5"),
    (
        lambda: compared(X, Y, D, seeds=[]),
        "seeds must be a number of seeds, or a list with at least one",
    ),
    (
        lambda: compared(X, Y, D, seeds=["a"]),
        "a seed must be a whole number of at least 0, got 'a'",
    ),
    (
        lambda: compared(X, Y, D, seeds=[0, 0]),
        "two runs would both be called 'fifo-seed0': give each method a",
    ),
    (lambda: compared(X, Y, D, seeds="3"), "seeds must be a whole number of at least 1, got '3'"),
    (lambda: compared(X, Y, D, seeds=None), "seeds must be a whole number of at least 1, got None"),
    (lambda: compared(X, Y, D, seeds=True), "seeds must be a whole number of at least 1, got True"),
    (
        lambda: compared(X, Y, D, capacity=0),
        "in [storage]: capacity must be 1 or more, got 0",
    ),
    (
        lambda: compared(X, Y, D, capacity=2.5),
        "'storage.capacity' cannot be 2.5: expected a whole number or a list, got",
    ),
    (
        lambda: compared(X, Y, D, capacity="ten"),
        "'storage.capacity' cannot be 'ten': expected a whole number or a list, got",
    ),
    (
        lambda: compared(X, Y, D, capacity=None),
        "'storage.capacity' cannot be None: expected a whole number or a list, got",
    ),
    (
        lambda: compared(X, Y, D, capacity=100000000000000000000),
        "in [storage]: capacity must be at most 2147483647, got",
    ),
    (lambda: compared(X, Y, D, rounds=0), "rounds must be a whole number of at least 1, got 0"),
    (lambda: compared(X, Y, D, rounds=-5), "rounds must be a whole number of at least 1, got -5"),
    (lambda: compared(X, Y, D, rounds=1.5), "rounds must be a whole number of at least 1, got 1.5"),
    (
        lambda: compared(X, Y, D, rounds="many"),
        "rounds must be a whole number of at least 1, got 'many'",
    ),
    (
        lambda: compared(X, Y, D, rounds=None),
        "rounds must be a whole number of at least 1, got None",
    ),
    (
        lambda: compared(X, Y, D, participation=0),
        "in [train]: participation must be above 0 and at most 1, got 0.0",
    ),
    (
        lambda: compared(X, Y, D, participation=2),
        "in [train]: participation must be above 0 and at most 1, got 2.0",
    ),
    (
        lambda: compared(X, Y, D, participation=float("nan")),
        "in [train]: participation must be above 0 and at most 1, got nan",
    ),
    (
        lambda: compared(X, Y, D, participation="all"),
        "'train.participation' cannot be 'all': expected a number, got",
    ),
    (lambda: compared(X, Y, D, epochs=0), "in [train]: epochs must be 1 or more, got 0"),
    (
        lambda: compared(X, Y, D, epochs=None),
        "'train.epochs' cannot be None: expected a whole number, got nothing",
    ),
    (
        lambda: compared(X, Y, D, learning_rate=0),
        "in [train]: learning_rate must be a finite number above 0, got",
    ),
    (
        lambda: compared(X, Y, D, learning_rate=-1),
        "in [train]: learning_rate must be a finite number above 0, got",
    ),
    (
        lambda: compared(X, Y, D, learning_rate=float("inf")),
        "in [train]: learning_rate must be a finite number above 0, got",
    ),
    (
        lambda: compared(X, Y, D, learning_rate="owned"),
        "learning_rate must be a number or \"own\", got 'owned'",
    ),
    (
        lambda: compared(X, Y, D, model="lenett"),
        "unknown model 'lenett': did you mean 'lenet'?; your own is",
    ),
    (
        lambda: compared(X, Y, D, model="lenet"),
        "model 'lenet' cannot take samples of shape [3]: Expected 3D",
    ),
    (lambda: compared(X, Y, D, model=5), "model must be a name, a torch.nn.Module or a factory of"),
    (
        lambda: compared(X, Y, D, model=None),
        "model must be a name, a torch.nn.Module or a factory of",
    ),
    (lambda: compared(X, Y, D, model="nets.py:f"), "there is no file nets.py (of 'nets.py:f')"),
    (
        lambda: compared(X, Y, D, model=lambda: 5),
        "the factory of model 'session-<lambda>' must make a",
    ),
    (
        lambda: compared(X, Y, D, test_fraction=0),
        "in [task]: test_fraction must be above 0 and below 1, got 0.0",
    ),
    (
        lambda: compared(X, Y, D, test_fraction=1),
        "in [task]: test_fraction must be above 0 and below 1, got 1.0",
    ),
    (
        lambda: compared(X, Y, D, test_fraction="x"),
        "'task.test_fraction' cannot be 'x': expected a number, got text",
    ),
    (lambda: compared(X, Y, devices=0), "in [partition]: devices must be 1 or more, got 0"),
    (lambda: compared(X, Y, devices=-1), "in [partition]: devices must be 1 or more, got -1"),
    (
        lambda: compared(X, Y, devices=1000000),
        "60 samples cannot give 1000000 devices 2 each; lower devices",
    ),
    (
        lambda: compared(X, Y, devices=1.5),
        "'partition.devices' cannot be 1.5: expected a whole number, got a number",
    ),
    (
        lambda: compared(X, Y, D, shuffle="no"),
        "'stream.shuffle' cannot be 'no': expected true or false, got text",
    ),
    (
        lambda: compared(X, Y, D, against=["odee"]),
        "no method 'odee' to compare with: known are: fifo",
    ),
    (lambda: compared(X, Y, D, against=5), "against must be a list of methods, got 5"),
    (lambda: compared(X, Y, D, jobs=0), "jobs must be a whole number of at least 1, got 0"),
    (lambda: compared(X, Y, D, jobs=-1), "jobs must be a whole number of at least 1, got -1"),
    (lambda: compared(X, Y, D, jobs="two"), "jobs must be a whole number of at least 1, got 'two'"),
    (
        lambda: compared(X, Y, D, out="good.csv"),
        "cannot keep records in good.csv: File exists; choose another",
    ),
    (lambda: compared(X, Y, D, out=5), "the folder for records must be a path, got 5"),
    (lambda: compared(FRAME), "compare needs the labels: pass y=, an array or the name of a"),
    (
        lambda: compared(FRAME, "labe", "device"),
        "the frame has no column 'labe' for label: did you mean 'label'?",
    ),
    (
        lambda: compared(FRAME, "label", "machine"),
        "the frame has no column 'machine' for device: known are: a, b,",
    ),
    (
        lambda: compared(FRAME.assign(c="red"), "label", "device"),
        "the frame, row 0: c is 'red', which is no number: leave the",
    ),
    (lambda: compared(FRAME.iloc[:0], "label", "device"), "there is no sample in the frame"),
    (
        lambda: compared(FRAME.assign(a=np.nan), "label", "device"),
        "the frame, row 0: a feature is missing, NaN or infinite",
    ),
    (lambda: compared(FRAME, "label", [1, 2]), "columns must be of one length, got [2, 60]"),
    (
        lambda: compared(pd.concat([FRAME, FRAME[["a"]]], axis=1), "label", "device"),
        "the frame has several columns called 'a': give each its name",
    ),
    (
        lambda: compared(FRAME, "label", "label"),
        "the frame: device, label and time must be different columns,",
    ),
    (
        lambda: compared(FRAME.assign(t=1700000000 + np.arange(60)), "label", "device"),
        "the frame: t looks like a time since 1970, and a time is no",
    ),
    (
        lambda: compared(FRAME[["label", "device"]], "label", "device"),
        "the frame has no feature columns besides label, device",
    ),
    (lambda: fedkeep.simulate("nofile.toml"), "there is no file nofile.toml"),
    (lambda: fedkeep.simulate(None), "simulate takes a TOML file or its tables, got NoneType"),
    (lambda: fedkeep.simulate(5), "simulate takes a TOML file or its tables, got int"),
    (lambda: fedkeep.simulate({}), "'task.name' is missing"),
    (
        lambda: fedkeep.simulate({"task": {"name": "x"}}),
        "unknown task 'x': known are: audio-mnist, c-mapss, custom,",
    ),
    (lambda: fedkeep.simulate({"task": 5}), "'task' must be a table, got 5"),
    (
        lambda: fedkeep.simulate({"task": {"name": "demo"}, "foo": 1}),
        "unknown key 'foo': known are: aggregation, coordinator,",
    ),
    (lambda: fedkeep.simulate("emptydir"), "cannot read emptydir: Is a directory"),
    (lambda: fedkeep.simulate([1]), "simulate takes a TOML file or its tables, got list"),
    (lambda: fedkeep.simulate(DEMO, jobs=0), "jobs must be a whole number of at least 1, got 0"),
    (
        lambda: fedkeep.simulate(DEMO, out="good.csv"),
        "cannot keep records in good.csv: File exists; choose another",
    ),
    (
        lambda: fedkeep.load_records("nodir"),
        "nodir is not a directory; give the one that `fedkeep run --out`",
    ),
    (
        lambda: fedkeep.load_records("good.csv"),
        "good.csv is not a directory; give the one that `fedkeep run",
    ),
    (
        lambda: fedkeep.load_records("emptydir"),
        "no runs in emptydir: it holds no .jsonl file that `fedkeep run`",
    ),
    (
        lambda: fedkeep.load_records("norun"),
        "no runs in norun: it holds no .jsonl file that `fedkeep run`",
    ),
    (lambda: fedkeep.load_records(None), "load_records takes a folder, got None"),
    (lambda: fedkeep.load_records(5), "load_records takes a folder, got 5"),
    (
        lambda: fedkeep.advise("no.csv"),
        "there is no file no.csv; a relative path starts at the folder",
    ),
    (lambda: fedkeep.advise(None), "advise takes the path of a .csv, .parquet or .npz file, or"),
    (lambda: fedkeep.advise(5), "advise takes the path of a .csv, .parquet or .npz file, or"),
    (lambda: fedkeep.advise(X), "advise takes the path of a .csv, .parquet or .npz file, or"),
    (
        lambda: fedkeep.advise("good.csv", bytes=-1),
        "bytes must be a whole number of at least 0, got -1",
    ),
    (
        lambda: fedkeep.advise("good.csv", bytes="5kB"),
        "bytes must be a whole number of at least 0, got '5kB'",
    ),
    (
        lambda: fedkeep.advise("good.csv", capacity=0),
        "in [storage]: capacity must be 1 or more, got 0",
    ),
    (
        lambda: fedkeep.advise("good.csv", capacity="x"),
        "'storage.capacity' cannot be 'x': expected a whole number or a list, got",
    ),
    (
        lambda: fedkeep.advise("good.csv", minutes=-1),
        "minutes must be a finite number above 0, got -1",
    ),
    (
        lambda: fedkeep.advise("good.csv", minutes=float("nan")),
        "minutes must be a finite number above 0, got nan",
    ),
    (
        lambda: fedkeep.advise("good.csv", model=5),
        "'task.model' cannot be 5: expected text, got a whole number",
    ),
    (
        lambda: fedkeep.advise("good.csv", jobs=0),
        "jobs must be a whole number of at least 1, got 0",
    ),
    (
        lambda: fedkeep.advise("good.csv", devices=1),
        "devices must be a whole number of at least 2, got 1",
    ),
    (lambda: fedkeep.advise("good.csv", backend="gpu"), "backend takes local or ray, got 'gpu'"),
    (
        lambda: fedkeep.advise("good.csv", device="machine"),
        "good.csv has no column 'machine'; it has device, label,",
    ),
    (
        lambda: fedkeep.advise("good.csv", participation=0),
        "in [train]: participation must be above 0 and at most 1, got 0.0",
    ),
    (lambda: fedkeep.Simulator(None), "a Simulator takes an Experiment:"),
    (lambda: fedkeep.Simulator({"task": {"name": "demo"}}), "a Simulator takes an Experiment:"),
    (lambda: fedkeep.Experiment.from_table({}), "'task.name' is missing"),
    (lambda: fedkeep.Experiment.from_table(5), "an experiment is a table of tables, got 5"),
    (
        lambda: fedkeep.Experiment.from_table({**DEMO, "train": {"rounds": "a"}}),
        "'train.rounds' cannot be 'a': expected a whole number, got text",
    ),
    (
        lambda: fedkeep.advise("good.csv", drift=3),
        "in [stream]: drift must be between 0 and 1, got 3.0",
    ),
    (lambda: fedkeep.advise("good.csv", label="cls"), "good.csv has no column 'cls'"),
    (lambda: fedkeep.advise("three.csv"), "too few to tell methods apart"),
]
KEEPERS = [
    (lambda: Keeper.open(None, NET, 5), "the keeper takes the ClientApp's Context, got NoneType"),
    (
        lambda: Keeper.open(CONTEXT, None, 5),
        "the keeper takes a torch module, its class, or a function that",
    ),
    (
        lambda: Keeper.open(CONTEXT, 5, 5),
        "the keeper takes a torch module, its class, or a function that",
    ),
    (
        lambda: Keeper.open(CONTEXT, "softmax", 5),
        "the keeper takes a torch module, its class, or a function that",
    ),
    (
        lambda: Keeper.open(CONTEXT, lambda: 1 / 0, 5),
        "<lambda> raised ZeroDivisionError: division by zero (",
    ),
    (
        lambda: Keeper.open(CONTEXT, lambda: 5, 5),
        "<lambda> must make a torch.nn.Module, it made int",
    ),
    (
        lambda: Keeper.open(CONTEXT, NET, 0),
        "capacity must be a whole number of samples, 1 or more, got 0",
    ),
    (
        lambda: Keeper.open(CONTEXT, NET, -1),
        "capacity must be a whole number of samples, 1 or more, got -1",
    ),
    (
        lambda: Keeper.open(CONTEXT, NET, 1.5),
        "capacity must be a whole number of samples, 1 or more, got 1.5",
    ),
    (
        lambda: Keeper.open(CONTEXT, NET, "x"),
        "capacity must be a whole number of samples, 1 or more, got 'x'",
    ),
    (
        lambda: Keeper.open(CONTEXT, NET, 5, policy="fifoo"),
        "unknown policy 'fifoo': did you mean 'fifo'?",
    ),
    (
        lambda: Keeper.open(CONTEXT, NET, 5, policy="full-data"),
        "policy 'full-data' keeps everything, and a keeper has a capacity",
    ),
    (lambda: Keeper.open(CONTEXT, NET, 5, policy=5), "'policy.name' must be a string"),
    (
        lambda: Keeper.open(CONTEXT, NET, 5, preset="papers"),
        "unknown preset 'papers': did you mean 'paper'?",
    ),
    (
        lambda: Keeper.open(CONTEXT, NET, 5, gist="all"),
        "'gist.mode' cannot be 'all': known are: local, none, shared",
    ),
    (lambda: Keeper.open(CONTEXT, NET, 5, gist=5), "'gist' must be a table, got 5"),
    (
        lambda: Keeper.open(CONTEXT, NET, 5, gist={"colour": 1}),
        "unknown key 'gist.colour': known are: drift_weight, encoding,",
    ),
    (
        lambda: Keeper.open(CONTEXT, NET, 5, labels=0),
        "labels must be a whole number of at least 1, got 0",
    ),
    (
        lambda: Keeper.open(CONTEXT, NET, 5, labels=1.5),
        "labels must be a whole number of at least 1, got 1.5",
    ),
    (lambda: Keeper.open(CONTEXT, NET, 5, loss=5), "loss must be a function, got 5"),
    (lambda: Keeper.open(CONTEXT, NET, 5, output=5), "output must be a function, got 5"),
    (lambda: Keeper.open(CONTEXT, NET, 5, collate=5), "collate must be a function, got 5"),
    (
        lambda: Keeper.open(CONTEXT, NET, 5, last_layers=-1),
        "last_layers must be a whole number of at least 1, got -1",
    ),
    (
        lambda: Keeper.open(CONTEXT, NET, 5, directory="good.csv"),
        "directory must be a folder, got 'good.csv'",
    ),
    (lambda: Keeper.open(CONTEXT, NET, 5, directory=5), "directory must be a folder, got 5"),
    (lambda: Keeper.open(CONTEXT, NET, 5, privacy=5), "'privacy' must be a table, got 5"),
    (
        lambda: Keeper.open(CONTEXT, NET, 5, privacy={"protect": ["model"]}),
        "a keeper protects its estimate alone: privacy takes epsilon,",
    ),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    make_files(folder)
    record = {**DEMO, "record": {"every": 1}}
    fedkeep.simulate(record, out=folder / "r0", jobs=1, progress=False)
    provision(folder / "creds", ["127.0.0.1"], ["node-0"])
    create_key(folder / "kh")
    (folder / "f2" / "nodes").mkdir(parents=True)
    (folder / "f2" / "fleet.toml").write_text("broken = {")
    return folder


@pytest.fixture(autouse=True)
def _inside(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("the mistake was accepted: the agent would have started")

    monkeypatch.chdir(made)
    monkeypatch.setattr(os, "execve", refuse)
    monkeypatch.delenv("FEDKEEP_TOKEN", raising=False)


def sentence(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Run a command as the script does; return the last line of what it prints as its error."""
    monkeypatch.setattr(sys, "argv", ["fedkeep", *arguments])
    with pytest.raises(SystemExit) as ended:
        fedkeep.cli.main()
    assert ended.value.code not in (0, None), "the mistake was accepted"
    text = capsys.readouterr().err.replace(f"{Path.cwd()}/", "")
    assert "Traceback" not in text
    assert "Warning" not in text
    return text.strip().split("\n")[-1]


@pytest.mark.parametrize(("data", "expected"), DATA, ids=[name for name, _ in DATA])
def test_wrong_data(
    data: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = "source" if ".py" in data or ":" in data else "path"
    setting = f"task.{key}='{data}'"
    command = ["run", "custom.toml", "--jobs", "1", "--out", str(tmp_path), "--set", setting]
    assert expected in sentence(command, monkeypatch, capsys)


@pytest.mark.parametrize(("setting", "expected"), SETTINGS, ids=[key for key, _ in SETTINGS])
def test_wrong_settings(
    setting: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["run", "good.toml", "--jobs", "1", "--out", str(tmp_path), "--set", setting]
    assert expected in sentence(command, monkeypatch, capsys)


@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=[str(one) for one, _ in COMMANDS])
def test_wrong_commands(
    command: str | list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = command.split() if isinstance(command, str) else command
    assert expected in sentence(arguments, monkeypatch, capsys)


@pytest.mark.parametrize(("old", "new", "expected"), AGENTS)
def test_wrong_agents(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert old in AGENT
    file = tmp_path / "agent.toml"
    file.write_text(AGENT.replace(old, new))
    with pytest.raises(FedkeepError) as error:
        Service(assemble(read_config(file))).close()
    for made_by_it in Path().glob("a.s*"):
        made_by_it.unlink()
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("old", "new", "expected"), FLEETS)
def test_wrong_fleets(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert old in FLEET
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.replace(old, new))
    with pytest.raises(FedkeepError) as error:
        check_specification(file)
    assert expected in str(error.value)


@pytest.mark.parametrize(("call", "expected"), [*CALLS, *KEEPERS])
def test_wrong_calls(call: Callable[[], Any], expected: str) -> None:
    with pytest.raises(FedkeepError) as error:
        call()
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("command", [["rum"], ["agent", "rum"]])
def test_a_misspelt_command_gets_one_suggestion(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence(command, monkeypatch, capsys).count("Did you mean 'run'") == 1


def test_there_are_hundreds_of_them() -> None:
    kinds = (DATA, SETTINGS, COMMANDS, AGENTS, FLEETS, CALLS, KEEPERS)
    assert sum(map(len, kinds)) >= 600  # type: ignore[arg-type]
