//! Charts as SVG: points and lines on linear or logarithmic axes, with a legend.
use std::path::Path;

use anyhow::Context;

use crate::num::{to_f64, to_u64};

/// Size of a chart in pixels; one with a long legend is higher.
const SIZE: (f64, f64) = (960.0, 560.0);
/// Left, right, top and bottom edge of the axes in it.
const EDGES: (f64, f64, f64, f64) = (80.0, 720.0, 40.0, 500.0);
/// Height of a line of the legend.
const LEGEND: f64 = 16.0;
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

/// Writes charts beside each other to a file.
pub(crate) fn write(path: &Path, charts: &[Chart]) -> anyhow::Result<()> {
    std::fs::write(path, svg(charts)).with_context(|| path.display().to_string())
}

/// Draws charts beside each other.
pub(crate) fn svg(charts: &[Chart]) -> String {
    let entries = charts.iter().map(|chart| chart.series.len()).max().unwrap_or(0);
    let height = SIZE.1.max(EDGES.2 + (count(entries) + 1.0) * LEGEND);
    let width = SIZE.0 * count(charts.len());
    let mut parts = vec![format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' \
         viewBox='0 0 {width} {height}' font-family='sans-serif' font-size='12'>\n\
         <rect width='100%' height='100%' fill='white'/>"
    )];
    for (index, chart) in charts.iter().enumerate() {
        parts.push(format!("<g transform='translate({} 0)'>", SIZE.0 * count(index)));
        chart.draw(&mut parts);
        parts.push("</g>".to_owned());
    }
    parts.push("</svg>\n".to_owned());
    parts.join("\n")
}

impl Chart {
    fn draw(&self, parts: &mut Vec<String>) {
        let (left, right, top, bottom) = EDGES;
        let points = || self.series.iter().flat_map(|series| series.points.iter().copied());
        let xs = self.x.ticks(points().map(|point| point.0));
        let ys = self.y.ticks(points().map(|point| point.1));
        let across = |x: f64| left + (right - left) * self.x.part(x, &xs);
        let up = |y: f64| bottom - (bottom - top) * self.y.part(y, &ys);
        let middle = f64::midpoint(left, right);
        parts.push(text((middle, top - 20.0), "font-size='18' text-anchor='middle'", self.title));
        parts.push(text((middle, bottom + 40.0), "text-anchor='middle'", self.x.label()));
        parts.push(text((8.0, top - 12.0), "", self.y.label()));
        for tick in &xs {
            let x = across(*tick);
            parts.push(line("lightgray", 1.0, &[(x, top), (x, bottom)]));
            parts.push(text((x, bottom + 18.0), "text-anchor='middle'", &number(*tick)));
        }
        for tick in &ys {
            let y = up(*tick);
            parts.push(line("lightgray", 1.0, &[(left, y), (right, y)]));
            parts.push(text((left - 6.0, y + 4.0), "text-anchor='end'", &number(*tick)));
        }
        for (index, series) in self.series.iter().enumerate() {
            let Series { name, mark, points } = series;
            let colour = colour(index);
            let places: Vec<_> = thinned(points).map(|(x, y)| (across(x), up(y))).collect();
            if matches!(mark, Mark::Line | Mark::Joined) {
                // Wider lines below, so that coinciding lines stay visible.
                let above = count(self.series.len().saturating_sub(index).min(5));
                parts.push(line(&colour, 1.0 + above, &places));
            }
            for (x, y) in places.iter().filter(|_| *mark != Mark::Line) {
                parts.push(match mark {
                    Mark::Crosses => format!(
                        "<path class='cross' d='M{:.1} {:.1}l8 8m-8 0l8 -8' \
                         stroke='{colour}' stroke-width='2'/>",
                        x - 4.0,
                        y - 4.0
                    ),
                    _ => format!("<circle cx='{x:.1}' cy='{y:.1}' r='3' fill='{colour}'/>"),
                });
                if *mark == Mark::Named {
                    let style = format!("fill='{colour}'");
                    parts.push(text((x + 5.0, y + 4.0), &style, name));
                }
            }
            let (x, y) = (right + 20.0, top + count(index) * LEGEND);
            parts.push(format!("<rect x='{x}' y='{y}' width='10' height='10' fill='{colour}'/>"));
            parts.push(text((x + 16.0, y + 10.0), "", name));
        }
    }
}

impl Axis {
    fn label(&self) -> &'static str {
        match self {
            Self::Linear(label) | Self::Log(label) => label,
        }
    }

    /// Returns the values to mark, ascending: they begin and end where the axis does.
    fn ticks(&self, values: impl Iterator<Item = f64>) -> Vec<f64> {
        let values: Vec<_> = values.filter(|value| value.is_finite() && *value > 0.0).collect();
        let high = values.iter().copied().fold(0.0, f64::max);
        let high = if high > 0.0 { high } else { 1.0 };
        if matches!(self, Self::Linear(_)) {
            let unit = 10_f64.powf((high / 5.0).log10().floor());
            let step = [1.0, 2.0, 5.0].map(|n| n * unit).into_iter().find(|n| n * 5.0 >= high);
            let step = step.unwrap_or(unit * 10.0);
            let ticks = (0..=5).map(|n| f64::from(n) * step);
            return ticks.take_while(|tick| tick - step < high).collect();
        }
        let low = values.iter().copied().fold(high, f64::min).max(high * 1e-12);
        let first = low.log10().floor();
        let last = high.log10().ceil().max(first + 1.0);
        let between: &[f64] = if last - first <= 2.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let next = |power: &f64| (power + 1.0 < last).then_some(power + 1.0);
        let powers = std::iter::successors(Some(first), next).map(|power| 10_f64.powf(power));
        let ticks = powers.flat_map(|power| between.iter().map(move |n| n * power));
        ticks.chain([10_f64.powf(last)]).collect()
    }

    /// Returns the place of a value between the ends, from 0 to 1.
    fn part(&self, value: f64, ticks: &[f64]) -> f64 {
        let (low, high) = (ticks.first().unwrap_or(&0.0), ticks.last().unwrap_or(&1.0));
        let value = value.max(*low).min(*high);
        match self {
            Self::Linear(_) => (value - low) / (high - low),
            Self::Log(_) => (value / low).ln() / (high / low).ln(),
        }
    }
}

fn count(n: usize) -> f64 {
    to_f64(to_u64(n))
}

/// Returns the colour of a series: hues far from those before, in three shades.
fn colour(index: usize) -> String {
    let shade = count(index.checked_rem(3).unwrap_or(0)) * 12.0;
    format!("hsl({:.0},75%,{}%)", (220.0 + 137.5 * count(index)) % 360.0, 35.0 + shade)
}

/// Returns at most about [`MARKS_MAX`] of the points.
fn thinned(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    let step = points.len().div_ceil(MARKS_MAX).max(1);
    let (last, before) = points.split_last().map_or((None, points), |(l, b)| (Some(l), b));
    before.iter().step_by(step).chain(last).copied()
}

fn line(colour: &str, width: f64, places: &[(f64, f64)]) -> String {
    let places: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    format!(
        "<polyline points='{}' fill='none' stroke='{colour}' stroke-width='{width}'/>",
        places.join(" ")
    )
}

fn text((x, y): (f64, f64), style: &str, text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x='{x:.1}' y='{y:.1}' {style}>{text}</text>")
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
        svg(&[Chart { title: "title", x, y, series }])
    }

    #[test]
    fn every_point_is_a_mark_and_every_name_is_escaped() {
        let points = || vec![(1.0, 1e-3), (2.0, 0.0), (30.0, f64::INFINITY)];
        let marks = [Mark::Points, Mark::Named, Mark::Crosses, Mark::Line, Mark::Joined];
        let series = marks.map(|mark| Series::new("l3 & <more>", mark, points()));
        let svg = chart(Axis::Linear("bits"), Axis::Log("nats"), series.into());
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
        assert_eq!(svg.matches("<circle ").count(), 9, "{svg}");
        assert_eq!(svg.matches("class='cross'").count(), 3, "{svg}");
        assert_eq!(svg.matches(">l3 &amp; &lt;more&gt;</text>").count(), 5 + 3, "{svg}");
        assert_eq!(svg.matches("stroke='hsl").count(), 3 + 2, "crosses and lines: {svg}");
        assert!(svg.contains("cy='500.0'") && svg.contains("cy='40.0'"), "{svg}");
        assert!(svg.contains(">title<") && svg.contains(">bits<") && svg.contains(">nats<"));
    }

    #[test]
    fn empty_data_gives_axes() {
        let svg = chart(Axis::Log("x"), Axis::Linear("y"), vec![]);
        assert!(svg.starts_with("<svg ") && svg.contains(">10<") && !svg.contains("NaN"), "{svg}");
        let zeros = vec![Series::new("zeros", Mark::Points, vec![(0.0, 0.0)])];
        let svg = chart(Axis::Log("x"), Axis::Linear("y"), zeros);
        assert!(svg.contains("<circle cx='80.0' cy='500.0'"), "{svg}");
    }

    #[test]
    fn ticks_are_round_and_enclose_the_values() {
        let (linear, log) = (Axis::Linear(""), Axis::Log(""));
        let of = |axis: &Axis, values: &[f64]| {
            axis.ticks(values.iter().copied()).into_iter().map(number).collect::<Vec<_>>()
        };
        assert_eq!(of(&linear, &[0.0, 32.0]), ["0", "10", "20", "30", "40"]);
        assert_eq!(of(&linear, &[0.35]), ["0", "0.1", "0.2", "0.3", "0.4"]);
        assert_eq!(of(&log, &[20.0, 0.0, 3000.0]), ["10", "100", "1000", "10000"]);
        assert_eq!(of(&log, &[100.0]), ["100", "200", "500", "1000"]);
        assert_eq!(of(&log, &[1e-5, 2.0]).join(" "), "1e-5 1e-4 0.001 0.01 0.1 1 10");
        assert!(log.part(0.1, &[0.01, 1.0]) > 0.49 && log.part(f64::NAN, &[0.01, 1.0]) < 0.01);
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
