//! Times as SVG: time to first token over the load, and how its values and those between tokens are
//! distributed.
use std::error::Error;
use std::time::Duration;

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::prelude::{
    BLACK, BLUE, ChartBuilder, Circle, Color, Cross, DrawingArea, GREEN, IntoDrawingArea,
    IntoLogRange, PathElement, RED, SVGBackend, SeriesLabelPosition, WHITE,
};

use super::drive::Measured;
use super::measure::milliseconds;
use crate::num::{to_f64, to_u64};

const SIZE: (u32, u32) = (1200, 480);
/// Most marks of one kind; of more, evenly spaced ones are drawn.
const MARKS_MAX: usize = 4000;

/// Draws a load.
pub(super) fn draw(measured: &Measured) -> anyhow::Result<String> {
    let mut svg = String::new();
    draw_to(&mut svg, measured).map_err(|error| anyhow!("the plot: {error}"))?;
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn draw_to(svg: &mut String, measured: &Measured) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let (left, right) = area.split_horizontally(SIZE.0.div_euclid(2));
    over_time(&left, measured)?;
    distributions(&right, measured)?;
    area.present()?;
    Ok(())
}

/// Draws a point for each request that succeeded, and a cross for each that failed.
fn over_time(area: &Area<'_>, measured: &Measured) -> Result<(), Box<dyn Error>> {
    let samples = || measured.samples.iter();
    let points: Vec<_> = samples()
        .filter(|sample| sample.result.is_ok())
        .filter_map(|sample| Some((sample.at.as_secs_f64(), milliseconds(sample.first?))))
        .collect();
    let failed = samples().filter(|sample| sample.result.is_err());
    let failed: Vec<_> = failed.map(|sample| (sample.at.as_secs_f64(), 0.0)).collect();
    let seconds = samples().map(|sample| sample.at.as_secs_f64()).fold(0.001, f64::max);
    let highest = points.iter().map(|(_, ms)| *ms).fold(0.001, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption("Time to first token; crosses failed", ("sans-serif", 18))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..seconds * 1.02, 0.0..highest * 1.08)?;
    chart.configure_mesh().max_light_lines(4).x_desc("sent at, s").y_desc("ms").draw()?;
    let point = |place| Circle::new(place, 2, BLUE.mix(0.6).filled());
    chart.draw_series(thinned(&points).map(point))?;
    chart.draw_series(thinned(&failed).map(|place| Cross::new(place, 3, RED)))?;
    Ok(())
}

/// Draws which share of the times is at most so long.
fn distributions(area: &Area<'_>, measured: &Measured) -> Result<(), Box<dyn Error>> {
    let good = || measured.samples.iter().filter(|sample| sample.result.is_ok());
    let first = cumulative(good().filter_map(|sample| sample.first).collect());
    let between = cumulative(measured.gaps.clone());
    let whole = cumulative(good().map(|sample| sample.whole).collect());
    let curves = [
        ("time to first token", BLUE, first),
        ("time between tokens", GREEN, between),
        ("whole request", BLACK, whole),
    ];
    let all = || curves.iter().flat_map(|(_, _, curve)| curve.iter().map(|(ms, _)| *ms));
    let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(0.01, f64::max));
    let low = if low < high { low } else { high / 10.0 };
    let mut chart = ChartBuilder::on(area)
        .caption("Share of times up to a length", ("sans-serif", 18))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d((low..high * 1.05).log_scale(), 0.0..1.0)?;
    chart
        .configure_mesh()
        .max_light_lines(1)
        .x_desc("ms")
        .x_label_formatter(&|ms| format!("{ms}"))
        .draw()?;
    for (name, colour, curve) in curves {
        chart.draw_series([PathElement::new(curve, colour.stroke_width(2))])?.label(name).legend(
            move |(x, y)| {
                let end = (x + 20, y);
                PathElement::new(vec![(x, y), end], colour.stroke_width(2))
            },
        );
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.4))
        .draw()?;
    Ok(())
}

/// Returns points of the distribution: milliseconds, and the share of times up to there.
fn cumulative(mut times: Vec<Duration>) -> Vec<(f64, f64)> {
    times.sort_unstable();
    let count = to_f64(to_u64(times.len())).max(1.0);
    let points: Vec<_> = times
        .iter()
        .zip(1_u64..)
        // A logarithmic axis has no 0.
        .map(|(time, rank)| (milliseconds(*time).max(0.001), to_f64(rank) / count))
        .collect();
    // The longest one is there, however many are left out.
    let last = points.last().copied();
    thinned(&points).chain(last).collect()
}

/// Returns at most [`MARKS_MAX`] of the marks, evenly spaced.
fn thinned(marks: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    marks.iter().copied().step_by(marks.len().div_ceil(MARKS_MAX).max(1))
}

#[cfg(test)]
mod tests {
    use super::super::client::Failure;
    use super::super::report::tests::{failed, sample};
    use super::*;

    #[test]
    fn every_request_is_a_mark_and_every_time_a_curve() {
        let timeout = || Failure::Timeout(Duration::from_secs(1));
        let samples =
            vec![sample(0, 5, 9), sample(1000, 7, 20), failed(1500, timeout()), sample(2000, 6, 8)];
        let gaps = vec![Duration::from_millis(1), Duration::ZERO];
        let svg = draw(&Measured { samples, gaps, elapsed: Duration::from_secs(3) });
        let svg = svg.expect("a plot");
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert_eq!(svg.matches("<circle ").count(), 3, "{svg}");
        assert!(svg.contains("#FF0000"), "a cross: {svg}");
        for words in ["time to first token", "time between tokens", "whole request", "sent at, s"] {
            assert!(svg.contains(&format!("\n{words}\n")), "{words}: {svg}");
        }
    }

    #[test]
    fn a_load_without_success_has_a_plot() {
        let empty = draw(&Measured::default()).expect("a plot");
        assert!(empty.starts_with("<svg ") && !empty.contains("<circle "));
        let one = Measured { samples: vec![sample(0, 0, 0)], ..Measured::default() };
        assert_eq!(draw(&one).expect("a plot").matches("<circle ").count(), 1);
    }

    #[test]
    fn many_marks_are_thinned_to_their_ends() {
        let times: Vec<_> = (1..=9999).map(Duration::from_millis).collect();
        let curve = cumulative(times);
        assert!(curve.len() <= MARKS_MAX + 1, "{}", curve.len());
        assert_eq!(curve.first(), Some(&(1.0, 1.0 / 9999.0)));
        assert_eq!(curve.last(), Some(&(9999.0, 1.0)));
        assert_eq!(cumulative(Vec::new()), []);
    }
}
