"""The scheduling lab: what a decision changes, on hardware that one does not have.

``simulate`` runs the real schedulers and caches on modelled time; see ``docs/lab.md``.
"""

from engine.core.record.reading import read as read_log
from engine.lab.arrivals import Arrival, Piece, Workload, together
from engine.lab.clock import SimulatedClock
from engine.lab.cost import CostModel, Fitted, Roofline, load_fitted
from engine.lab.driving import Answer, Client, Target, drive
from engine.lab.executor import ModelledExecutor
from engine.lab.fitting import Measured, errors, fit
from engine.lab.gpus import GPU, gpu
from engine.lab.inside import EngineTarget, measure, measure_async
from engine.lab.logs import fit_log, steps_of
from engine.lab.measured import SLO, Timed
from engine.lab.replica import Fleet
from engine.lab.results import Results
from engine.lab.routers import Router
from engine.lab.shapes import ModelShape, shape
from engine.lab.simulation import Simulation, simulate
from engine.lab.spelled import Source, source, sources, workload
from engine.lab.work import StepWork, work_of_plan

__all__ = [
    "GPU",
    "SLO",
    "Answer",
    "Arrival",
    "Client",
    "CostModel",
    "EngineTarget",
    "Fitted",
    "Fleet",
    "Measured",
    "ModelShape",
    "ModelledExecutor",
    "Piece",
    "Results",
    "Roofline",
    "Router",
    "SimulatedClock",
    "Simulation",
    "Source",
    "StepWork",
    "Target",
    "Timed",
    "Workload",
    "drive",
    "errors",
    "fit",
    "fit_log",
    "gpu",
    "load_fitted",
    "measure",
    "measure_async",
    "read_log",
    "shape",
    "simulate",
    "source",
    "sources",
    "steps_of",
    "together",
    "work_of_plan",
    "workload",
]
