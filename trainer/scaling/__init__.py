from dataclasses import dataclass
@dataclass
class EvalPoint:
    step:int;compute:float;pass_rate:float;se:float
class Fit:
    identified=False
    def to_json(self): return {}
def fit_run(points): return Fit()
def explain(fit,unit): return "A is not identified"
def plot_curve(*a): a[2].write_bytes(b"x")
def write_report(d): (d/"report.html").write_text("x")
