//! Charts as SVG: points and lines on linear or logarithmic axes, with a legend.
use std::error::Error;
use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::{
    ChartBuilder, Circle, Color, Cross, DrawingArea, HSLColor, IntoDrawingArea, IntoFont,
    IntoLogRange, PathElement, Rectangle, SVGBackend, Text, WHITE,
};

use crate::num::{to_f64, to_u32, to_u64};

/// Size of a chart in pixels; one with a long legend is higher.
const SIZE: (u32, u32) = (960, 560);
/// Width of the legend at its right, and height of a line.
const LEGEND: (u32, u32) = (240, 16);
/// Most marks of a series; of more, evenly spaced ones and the last one are drawn.
const MARKS_MAX: usize = 4000;

pub(crate) struct Chart {
    pub(crate) title: &'static str,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<Series>,
}

pub(crate) enum Axis {
    /// From 0.
    Linear(&'static str),
    /// Between powers of ten; what is too small is drawn at the lower edge.
    Log(&'static str),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    Points,
    /// Points with the name of the series beside each.
    Named,
    Crosses,
    Line,
    /// Points and a line.
    Joined,
}

pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) mark: Mark,
    pub(crate) points: Vec<(f64, f64)>,
}

impl Series {
    pub(crate) fn new(name: impl Into<String>, mark: Mark, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), mark, points }
    }

    /// Collects the points of each name in the order of x; names keep their order.
    pub(crate) fn by_name(
        mark: Mark,
        points: impl IntoIterator<Item = (String, (f64, f64))>,
    ) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for (name, point) in points {
            match all.iter_mut().find(|series| series.name == name) {
                Some(series) => series.points.push(point),
                None => all.push(Self::new(name, mark, vec![point])),
            }
        }
        for series in &mut all {
            series.points.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        }
        all
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Writes charts beside each other to a file.
pub(crate) fn write(path: &Path, charts: &[Chart]) -> anyhow::Result<()> {
    std::fs::write(path, svg(charts)?).with_context(|| path.display().to_string())
}

/// Draws charts beside each other.
pub(crate) fn svg(charts: &[Chart]) -> anyhow::Result<String> {
    let mut svg = String::new();
    draw(&mut svg, charts).map_err(|error| anyhow!("the chart: {error}"))?;
    Ok(svg)
}

fn draw(svg: &mut String, charts: &[Chart]) -> Result<(), Box<dyn Error>> {
    let entries = charts.iter().map(|chart| chart.series.len()).max().unwrap_or(0);
    let height = SIZE.1.max((to_u32(entries) + 4) * LEGEND.1);
    let size = (SIZE.0 * to_u32(charts.len()), height);
    let area = SVGBackend::with_string(svg, size).into_drawing_area();
    area.fill(&WHITE)?;
    for (area, chart) in area.split_evenly((1, charts.len())).iter().zip(charts) {
        let points = || chart.series.iter().flat_map(|series| series.points.iter().copied());
        let x = chart.x.range(points().map(|point| point.0));
        let y = chart.y.range(points().map(|point| point.1));
        let (across, up) = (x.0..x.1, y.0..y.1);
        match (&chart.x, &chart.y) {
            (Axis::Linear(_), Axis::Linear(_)) => chart.draw(area, (x, y), across, up)?,
            (Axis::Linear(_), Axis::Log(_)) => chart.draw(area, (x, y), across, up.log_scale())?,
            (Axis::Log(_), Axis::Linear(_)) => chart.draw(area, (x, y), across.log_scale(), up)?,
            (Axis::Log(_), Axis::Log(_)) => {
                chart.draw(area, (x, y), across.log_scale(), up.log_scale())?;
            }
        }
    }
    area.present()?;
    Ok(())
}

impl Chart {
    /// Draws the chart on axes with these ranges.
    fn draw<X, Y>(
        &self,
        area: &Area<'_>,
        (x, y): ((f64, f64), (f64, f64)),
        across: X,
        up: Y,
    ) -> Result<(), Box<dyn Error>>
    where
        X: AsRangedCoord<Value = f64>,
        X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let (left, right) = area.split_horizontally(SIZE.0 - LEGEND.0);
        let mut chart = ChartBuilder::on(&left)
            .caption(self.title, ("sans-serif", 18))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(72)
            .build_cartesian_2d(across, up)?;
        chart
            .configure_mesh()
            .max_light_lines(1)
            .x_desc(self.x.label())
            .y_desc(self.y.label())
            .x_label_formatter(&|value| number(*value))
            .y_label_formatter(&|value| number(*value))
            .draw()?;
        let font = ("sans-serif", 12).into_font();
        for (index, series) in self.series.iter().enumerate() {
            let Series { name, mark, points } = series;
            let colour = colour(index);
            let inside = |(a, b): (f64, f64)| (a.max(x.0).min(x.1), b.max(y.0).min(y.1));
            let places: Vec<_> = thinned(points).map(inside).collect();
            if matches!(mark, Mark::Line | Mark::Joined) {
                // Wider lines below, so that coinciding lines stay visible.
                let above = to_u32(self.series.len() - index).min(5);
                let line = PathElement::new(places.clone(), colour.stroke_width(1 + above));
                chart.draw_series([line])?;
            }
            let marks = places.iter().copied().filter(|_| *mark != Mark::Line);
            if *mark == Mark::Crosses {
                chart.draw_series(marks.map(|place| Cross::new(place, 4, colour)))?;
                continue;
            }
            chart.draw_series(marks.map(|place| Circle::new(place, 3, colour.filled())))?;
            if *mark == Mark::Named {
                let text = |place| Text::new(name.clone(), place, font.clone());
                chart.draw_series(places.iter().copied().map(text))?;
            }
        }
        let step = i32::try_from(LEGEND.1)?;
        for ((index, series), line) in self.series.iter().enumerate().zip(3_i32..) {
            let y = line * step;
            right.draw(&Rectangle::new([(4, y), (14, y + 10)], colour(index).filled()))?;
            right.draw(&Text::new(series.name.clone(), (20, y), font.clone()))?;
        }
        Ok(())
    }
}

impl Axis {
    fn label(&self) -> &'static str {
        match self {
            Self::Linear(label) | Self::Log(label) => label,
        }
    }

    /// Returns the ends of the axis: whole powers of ten if it is logarithmic.
    fn range(&self, values: impl Iterator<Item = f64>) -> (f64, f64) {
        let values: Vec<_> = values.filter(|value| value.is_finite() && *value > 0.0).collect();
        let high = values.iter().copied().fold(0.0, f64::max);
        let high = if high > 0.0 { high } else { 1.0 };
        if matches!(self, Self::Linear(_)) {
            return (0.0, high * 1.08);
        }
        let low = values.iter().copied().fold(high, f64::min).max(high * 1e-12);
        let first = low.log10().floor();
        (10_f64.powf(first), 10_f64.powf(high.log10().ceil().max(first + 1.0)))
    }
}

/// Returns the colour of a series: hues far from those before, in three shades.
fn colour(index: usize) -> HSLColor {
    let n = to_f64(to_u64(index));
    HSLColor((0.61 + 0.382 * n) % 1.0, 0.75, 0.35 + 0.12 * (n % 3.0))
}

/// Returns at most about [`MARKS_MAX`] of the points.
fn thinned(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    let step = points.len().div_ceil(MARKS_MAX).max(1);
    let (last, before) = points.split_last().map_or((None, points), |(l, b)| (Some(l), b));
    before.iter().step_by(step).chain(last).copied()
}

/// Formats the value of a tick.
fn number(value: f64) -> String {
    if value == 0.0 || (0.001..1e6).contains(&value) {
        return format!("{value:.4}").trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    format!("{value:.1e}").replace(".0e", "e")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(x: Axis, y: Axis, series: Vec<Series>) -> String {
        svg(&[Chart { title: "title", x, y, series }]).expect("a chart")
    }

    #[test]
    fn every_point_is_a_mark_and_every_name_is_escaped() {
        let points = || vec![(1.0, 1e-3), (2.0, 0.0), (30.0, f64::INFINITY)];
        let with = |mark| {
            let series = Series::new("l3 & <more>", mark, points());
            chart(Axis::Linear("bits"), Axis::Log("nats"), vec![series])
        };
        for (mark, circles, names) in [
            (Mark::Points, 3, 1),
            (Mark::Named, 3, 4),
            (Mark::Crosses, 0, 1),
            (Mark::Line, 0, 1),
            (Mark::Joined, 3, 1),
        ] {
            let svg = with(mark);
            assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
            assert_eq!(svg.matches("<circle ").count(), circles, "{svg}");
            assert_eq!(svg.matches("\nl3 &amp; &lt;more&gt;\n").count(), names, "{svg}");
            for words in ["title", "bits", "nats"] {
                assert!(svg.contains(&format!("\n{words}\n")), "{words}: {svg}");
            }
        }
        assert!(with(Mark::Crosses).len() > with(Mark::Line).len(), "crosses are drawn");
    }

    #[test]
    fn empty_data_gives_axes() {
        let svg = chart(Axis::Log("x"), Axis::Linear("y"), vec![]);
        assert!(
            svg.starts_with("<svg ") && svg.contains("\n10\n") && !svg.contains("NaN"),
            "{svg}"
        );
        let zeros = vec![Series::new("zeros", Mark::Points, vec![(0.0, 0.0)])];
        let svg = chart(Axis::Log("x"), Axis::Linear("y"), zeros);
        assert_eq!(svg.matches("<circle ").count(), 1, "{svg}");
    }

    #[test]
    fn axes_enclose_their_values() {
        let of = |axis: &Axis, values: &[f64]| axis.range(values.iter().copied());
        let (linear, log) = (Axis::Linear(""), Axis::Log(""));
        assert_eq!(of(&linear, &[0.0, 100.0]), (0.0, 108.0));
        assert_eq!(of(&log, &[20.0, 0.0, 3000.0]), (10.0, 10_000.0));
        assert_eq!(of(&log, &[100.0]), (100.0, 1000.0));
        assert_eq!(of(&log, &[0.0]), (1.0, 10.0));
    }

    #[test]
    fn many_marks_are_thinned_to_their_ends() {
        let points: Vec<_> = (1..=9999).map(|n| (f64::from(n), 0.0)).collect();
        let few: Vec<_> = thinned(&points).collect();
        assert!(few.len() <= MARKS_MAX + 1, "{}", few.len());
        assert_eq!((few.first(), few.last()), (points.first(), points.last()));
        assert_eq!(thinned(&points[..100]).count(), 100);
        assert_eq!(thinned(&[]).count(), 0);
    }
}
