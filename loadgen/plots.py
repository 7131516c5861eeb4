"""Pure: the plots of a report. Importing this loads plotly."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from plotly import graph_objects
from plotly.subplots import make_subplots

from loadgen.metrics import figures, in_flight_steps, rolling_hit_ratio, tpot_s, ttft_s
from loadgen.records import RequestRecord, Run

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C1E", "#555")
_INSTANCE_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#999999")
_INK = "#1f2933"
_GRID = "#e6e9ee"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_CURVE_POINTS_MAX = 400  # a curve has no more pixels; a point per request would bloat the file
_LOG_TICK_STEPS = (
    (1.0, (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)),
    (4.0, (1, 2, 5)),
    (float("inf"), (1,)),
)
_TIME_BINS = 160
_ROLLING_WINDOWS = 12  # windows of the rolling hit ratio in a run
_PLOT_HEIGHT_PX = 400
_PANEL_HEIGHT_PX = 170


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure with the words around it."""

    heading: str
    explanation: str
    figure: graph_objects.Figure


def run_colour(index: int) -> str:
    """Colour of the run at this place, the same in every plot and in the table."""
    return _RUN_COLOURS[index % len(_RUN_COLOURS)]


def all_plots(runs: Sequence[Run]) -> Iterator[Plot]:
    """The plots there is data for, in the order of a report."""
    yield from _times_plot(
        runs, ttft_s, "Time to first token", "From sending a request to its first token."
    )
    yield from _times_plot(
        runs, tpot_s, "Time per output token", "Mean gap between the tokens of a request."
    )
    yield from _batch_size_plot(runs)
    yield from _hit_ratio_plot(runs)


def _times_plot(
    runs: Sequence[Run],
    value_s: Callable[[RequestRecord], float | None],
    heading: str,
    explanation: str,
) -> Iterator[Plot]:
    """Cumulative distribution per run over a logarithmic axis, P50 and P99 marked."""
    figure = _figure(_PLOT_HEIGHT_PX)
    everything: list[float] = []
    for index, run in enumerate(runs):
        values = [v for record in run.records if (v := value_s(record)) is not None and v > 0]
        if not values:
            continue
        everything += values
        shares = np.linspace(0, 100, min(_CURVE_POINTS_MAX, max(2, len(values))))
        figure.add_scatter(
            x=np.percentile(values, shares),
            y=shares,
            name=run.name,
            legendgroup=run.name,
            line={"color": run_colour(index), "width": 2.5},
            hovertemplate="%{y:.0f} % within %{x:.3s}s",
        )
        figure.add_scatter(
            x=np.percentile(values, (50, 99)),
            y=(50, 99),
            text=(f"{run.name} P50", f"{run.name} P99"),
            mode="markers",
            legendgroup=run.name,
            showlegend=False,
            marker={"color": "white", "size": 8, "line": {"color": run_colour(index), "width": 2}},
            hovertemplate="%{text}: %{x:.3s}s<extra></extra>",
        )
    if not everything:
        return
    ticks_s = _log_ticks(min(everything), max(everything))
    figure.update_xaxes(
        type="log",
        tickvals=ticks_s,
        ticktext=[_seconds_text(tick_s) for tick_s in ticks_s],
        title=f"{heading.lower()} (logarithmic)",
    )
    figure.update_yaxes(title="requests within it (%)", range=(0, 102), dtick=25)
    explanation += " Further left is faster; the circles mark P50 and P99."
    yield Plot(heading=heading, explanation=explanation, figure=figure)


def _batch_size_plot(runs: Sequence[Run]) -> Iterator[Plot]:
    """A panel per run, a line per instance, equal scales."""
    steps_of_runs = [in_flight_steps(run.records) for run in runs]
    shown = [index for index, steps in enumerate(steps_of_runs) if steps]
    if not shown:
        return
    end_s = max(moments[-1] for steps in steps_of_runs for moments, _ in steps.values())
    edges_s = np.linspace(0, end_s, _TIME_BINS + 1)
    figure = make_subplots(
        rows=len(shown),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.2 / len(shown),
        subplot_titles=[_panel_title(runs[index]) for index in shown],
    )
    _style(figure, 130 + _PANEL_HEIGHT_PX * len(shown))
    top = 0.0
    for row, index in enumerate(shown, 1):
        for rank, (instance, (moments_s, counts)) in enumerate(steps_of_runs[index].items()):
            means = _bin_means(moments_s, counts, edges_s)
            top = max(top, float(means.max()))
            figure.add_scatter(
                x=(edges_s[:-1] + edges_s[1:]) / 2,
                y=means,
                name=f"instance {rank + 1}",
                legendgroup=str(rank),
                showlegend=row == 1,
                line={"color": _INSTANCE_COLOURS[rank % len(_INSTANCE_COLOURS)], "width": 1.6},
                hovertemplate=f"{instance}: %{{y:.1f}}<extra></extra>",
                row=row,
                col=1,
            )
    figure.update_annotations(x=0, xanchor="left", font={"size": 14, "color": _INK})
    figure.update_yaxes(title="requests", range=(0, 1.05 * top))
    figure.update_layout(margin={"t": 90}, legend={"y": 1, "yref": "container", "yanchor": "top"})
    figure.update_xaxes(range=(0, end_s))
    figure.update_xaxes(title="time since start (s)", row=len(shown), col=1)
    yield Plot(
        heading="Batch size per instance",
        explanation=(
            f"Requests in flight on each instance as the client sees it, averaged over "
            f"{_seconds_text(end_s / _TIME_BINS)}. Lines that stay together mean a balanced fleet."
        ),
        figure=figure,
    )


def _hit_ratio_plot(runs: Sequence[Run]) -> Iterator[Plot]:
    """A line per run."""
    figure = _figure(_PLOT_HEIGHT_PX)
    ends_s = [r.finished_s for run in runs for r in run.records if r.finished_s is not None]
    window_s = max(ends_s, default=0.0) / _ROLLING_WINDOWS
    drawn = False
    for index, run in enumerate(runs):
        moments_s, ratios = rolling_hit_ratio(run.records, window_s=window_s)
        if not len(moments_s):
            continue
        drawn = True
        picked = np.linspace(0, len(moments_s) - 1, min(_CURVE_POINTS_MAX, len(moments_s)))
        places = picked.round().astype(int)
        figure.add_scatter(
            x=moments_s[places],
            y=100 * ratios[places],
            name=run.name,
            line={"color": run_colour(index), "width": 2.5},
            hovertemplate="%{y:.1f} %",
        )
    if not drawn:
        return
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title="time since start (s)", rangemode="tozero")
    figure.update_yaxes(title="hit ratio, actual (%)", range=(0, 100), dtick=25)
    yield Plot(
        heading="Hit ratio over time",
        explanation=(
            "Share of prompt tokens the engines found in their KV$, over the last "
            f"{_seconds_text(window_s)}. Caches start cold."
        ),
        figure=figure,
    )


def _panel_title(run: Run) -> str:
    imbalance = figures(run.records).in_flight_imbalance
    return f"<b>{run.name}</b>" + ("" if imbalance is None else f"   max / mean {imbalance:.2f}")


def _bin_means(
    moments_s: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    edges_s: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Time averages of a step function between the edges."""
    area = np.concatenate(([0.0], np.cumsum(counts[:-1] * np.diff(moments_s))))
    # Between moments the integral of a step function is linear, and flat outside of them.
    means: npt.NDArray[np.float64] = np.diff(np.interp(edges_s, moments_s, area)) / np.diff(edges_s)
    return means


def _log_ticks(least: float, greatest: float) -> list[float]:
    """Round values around the given ones, denser the fewer decades there are to cover."""
    decades = np.log10(greatest / least)
    steps = next(steps for decades_max, steps in _LOG_TICK_STEPS if decades <= decades_max)
    first, last = int(np.floor(np.log10(least))), int(np.ceil(np.log10(greatest)))
    return [step * 10.0**exponent for exponent in range(first, last + 1) for step in steps]


def _seconds_text(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale * 0.9999:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.1g} s"


def _figure(height_px: int) -> graph_objects.Figure:
    figure = graph_objects.Figure()
    _style(figure, height_px)
    return figure


def _style(figure: graph_objects.Figure, height_px: int) -> None:
    figure.update_layout(
        height=height_px,
        margin={"l": 70, "r": 24, "t": 56, "b": 60},
        paper_bgcolor="white",
        plot_bgcolor="white",
        font={"family": _FONT, "size": 13, "color": _INK},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        hoverlabel={"bgcolor": "white", "font": {"family": _FONT, "size": 12}},
    )
    axis = {"gridcolor": _GRID, "linecolor": "#9aa5b1", "zeroline": False, "showline": True}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
