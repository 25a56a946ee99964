//! A roofline plot as SVG: bytes against time, one point per case, and the lines of the limits.
use std::error::Error;

use anyhow::anyhow;
use kv_bench::measure::{CaseLine, RooflineKind, middle};
use plotters::prelude::{
    BLACK, ChartBuilder, Circle, Color, HSLColor, IntoDrawingArea, IntoFont, IntoLogRange,
    PathElement, Rectangle, SVGBackend, Text, WHITE,
};

use crate::num::{to_f64, to_u32};

const WIDTH: u32 = 1200;
const HEIGHT: u32 = 640;
/// Width of the legend at the right, and height of its lines.
const LIST: (u32, u32) = (220, 14);

/// One operation in one format: a colour and its points, bytes and microseconds.
struct Series {
    name: String,
    colour: HSLColor,
    points: Vec<(f64, f64)>,
}

/// Draws every case.
pub(super) fn draw(lines: &[&CaseLine]) -> anyhow::Result<String> {
    let mut svg = String::new();
    draw_to(&mut svg, lines).map_err(|error| anyhow!("the plot: {error}"))?;
    Ok(svg)
}

fn draw_to(svg: &mut String, lines: &[&CaseLine]) -> Result<(), Box<dyn Error>> {
    let series = series(lines);
    let listed = (to_u32(series.len()) + 6) * LIST.1;
    let height = HEIGHT.max(listed);
    let area = SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
    area.fill(&WHITE)?;
    let (left, right) = area.split_horizontally(WIDTH.saturating_sub(LIST.0));
    let all = || series.iter().flat_map(|series| series.points.iter().copied());
    let (bytes, us) = (range(all().map(|point| point.0)), range(all().map(|point| point.1)));
    let mut chart = ChartBuilder::on(&left)
        .caption("Bytes against time, and the limits", ("sans-serif", 18))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d((bytes.0..bytes.1).log_scale(), (us.0..us.1).log_scale())?;
    chart
        .configure_mesh()
        .max_light_lines(1)
        .x_desc("bytes of one layer")
        .y_desc("us of one layer")
        .x_label_formatter(&|bytes| format!("{bytes:.0e}"))
        .y_label_formatter(&|us| format!("{us:.0e}"))
        .draw()?;
    let limits = [(RooflineKind::Read, "read limit", 0.9), (RooflineKind::Copy, "copy limit", 0.4)];
    let mut texts = Vec::new();
    for (kind, name, strength) in limits {
        let Some(rate) = middle(lines.iter().copied(), kind).filter(|rate| *rate > 0.0) else {
            continue;
        };
        // 10^9 bytes per second are 10^3 per microsecond; lines outside of the chart are not drawn.
        let us_of = |bytes: f64| bytes / (rate * 1e3);
        let from = bytes.0.max(us.0 * rate * 1e3);
        let to = bytes.1.min(us.1 * rate * 1e3);
        let colour = BLACK.mix(strength);
        if from < to {
            let ends = vec![(from, us_of(from)), (to, us_of(to))];
            chart.draw_series([PathElement::new(ends, colour.stroke_width(2))])?;
        }
        texts.push((format!("{name} {rate:.1} GB/s"), colour));
    }
    for series in &series {
        let colour = series.colour;
        let inside = series.points.iter().map(|(b, t)| (b.max(bytes.0), t.max(us.0)));
        chart.draw_series(inside.map(|point| Circle::new(point, 4, colour.mix(0.8).filled())))?;
    }
    let named = series.iter().map(|series| (series.name.clone(), series.colour.to_rgba()));
    let font = ("sans-serif", 12).into_font();
    let step = i32::try_from(LIST.1)?;
    for ((text, colour), line) in texts.into_iter().chain(named).zip(3_i32..) {
        let y = line * step;
        let corners = [(4, y), (14, y + 10)];
        right.draw(&Rectangle::new(corners, colour.filled()))?;
        right.draw(&Text::new(text, (20, y), font.clone()))?;
    }
    area.present()?;
    Ok(())
}

/// Makes the series: a hue per operation, a shade per format.
fn series(lines: &[&CaseLine]) -> Vec<Series> {
    let mut operations: Vec<&str> = Vec::new();
    for line in lines {
        if !operations.contains(&line.case) {
            operations.push(line.case);
        }
    }
    let part =
        |index: usize, of: usize| to_f64(to_u32(index).into()) / f64::from(to_u32(of).max(1));
    let mut all = Vec::new();
    for (operation, name) in operations.iter().enumerate() {
        let mut own: Vec<Series> = Vec::new();
        for line in lines.iter().filter(|line| line.case == *name) {
            let name = format!("{} {}", line.case, line.format);
            let point = (to_f64(line.bytes), line.ns / 1e3);
            if let Some(series) = own.iter_mut().find(|series| series.name == name) {
                series.points.push(point);
            } else {
                let colour = HSLColor(0.0, 0.0, 0.0);
                own.push(Series { name, colour, points: vec![point] });
            }
        }
        let shades = own.len();
        for (shade, series) in own.iter_mut().enumerate() {
            let lightness = 0.3 + 0.4 * part(shade, shades);
            series.colour = HSLColor(part(operation, operations.len()), 0.8, lightness);
        }
        all.extend(own);
    }
    all
}

/// Returns whole powers of ten around all values; zeros are drawn at the edge.
fn range(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let seen = values.filter(|value| *value > 0.0);
    let (low, high) = (seen.clone().fold(f64::INFINITY, f64::min), seen.fold(0.0, f64::max));
    if high <= 0.0 {
        return (1.0, 10.0);
    }
    let (low, high) = (10_f64.powf(low.log10().floor()), 10_f64.powf(high.log10().ceil()));
    (low, if high > low { high } else { low * 10.0 })
}

#[cfg(test)]
mod tests {
    use kv_bench::measure::Suite;

    use super::super::suite::tests::report;
    use super::*;

    #[test]
    fn every_case_is_a_point() {
        let report = report(&[Suite::Decode, Suite::Append, Suite::Plan], &["bf16", "int8/l4"]);
        let lines = report.lines();
        let svg = draw(&lines).expect("a plot");
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert_eq!(svg.matches("<circle ").count(), lines.len());
        for text in ["decode bf16", "append int8/l4", "plan bf16", "read limit 20.0 GB/s"] {
            assert!(svg.contains(&format!("\n{text}\n")), "{text}: {svg}");
        }
    }

    #[test]
    fn plans_alone_have_no_bytes_and_a_place() {
        let report = report(&[Suite::Plan], &[]);
        let lines = report.lines();
        let svg = draw(&lines).expect("a plot");
        assert_eq!(svg.matches("<circle ").count(), lines.len());
        assert!(!svg.contains("limit "), "{svg}");
        assert_eq!(draw(&[]).expect("a plot").matches("<circle ").count(), 0);
    }

    #[test]
    fn axes_end_at_powers_of_ten() {
        let of = |values: &[f64]| range(values.iter().copied());
        assert_eq!(of(&[20.0, 0.0, 3000.0]), (10.0, 10_000.0));
        assert_eq!(of(&[100.0]), (100.0, 1000.0));
        assert_eq!(of(&[0.0]), (1.0, 10.0));
    }
}
