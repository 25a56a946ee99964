//! Hit ratio against capacity as SVG, one line per policy.
use std::error::Error;

use anyhow::anyhow;
use plotters::prelude::{
    BLACK, ChartBuilder, Circle, Color, IntoDrawingArea, IntoLogRange, Palette, Palette99,
    PathElement, SVGBackend, SeriesLabelPosition, WHITE,
};

use super::report::Line;
use crate::num::{to_f64, to_u32};

const SIZE: (u32, u32) = (960, 640);

/// The hits of one policy: a point per capacity, ascending.
struct Curve {
    name: String,
    points: Vec<(f64, f64)>,
    /// Whether the policy has no capacity, so that the line is level.
    is_level: bool,
}

/// Draws every policy's hit ratios.
pub(super) fn draw(lines: &[Line]) -> anyhow::Result<String> {
    let mut svg = String::new();
    draw_to(&mut svg, lines).map_err(|error| anyhow!("the plot: {error}"))?;
    Ok(svg)
}

fn draw_to(svg: &mut String, lines: &[Line]) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let (least, most) = capacities(lines);
    let curves = curves(lines);
    let ratios = curves.iter().flat_map(|curve| curve.points.iter().map(|(_, ratio)| *ratio));
    let highest = ratios.fold(0.01, f64::max);
    let mut chart = ChartBuilder::on(&area)
        .caption("Token hit ratio by capacity", ("sans-serif", 18))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d((least..most).log_scale(), 0.0..highest * 1.08)?;
    chart
        .configure_mesh()
        .max_light_lines(4)
        .x_desc("capacity, blocks")
        .y_desc("hit tokens of all input tokens")
        .x_label_formatter(&|blocks| blocks_label(*blocks))
        .y_label_formatter(&|ratio| format!("{ratio:.3}"))
        .draw()?;
    let above = (0..to_u32(curves.len())).rev();
    for ((index, above), curve) in (0_usize..).zip(above).zip(curves) {
        let Curve { name, points, is_level } = curve;
        // Wider lines below, so that coinciding lines stay visible.
        let width = above + 2;
        let colour = Palette99::pick(index).to_rgba();
        let ends = points.first().map(|(_, ratio)| vec![(least, *ratio), (most, *ratio)]);
        let line = if is_level { ends.unwrap_or_default() } else { points.clone() };
        chart
            .draw_series([PathElement::new(line, colour.stroke_width(width))])?
            .label(name)
            .legend(move |(x, y)| {
                let end = (x + 20, y);
                PathElement::new(vec![(x, y), end], colour.stroke_width(2))
            });
        let inside = points.into_iter().filter(|_| !is_level);
        chart.draw_series(inside.map(|point| Circle::new(point, width + 2, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.4))
        .draw()?;
    area.present()?;
    Ok(())
}

/// Formats a label of the axis; between powers of ten there is room for two.
fn blocks_label(blocks: f64) -> String {
    let text = format!("{blocks:.0}");
    let is_shown = text.starts_with(['1', '2', '5']);
    if is_shown { text } else { String::new() }
}

/// Returns the range of the axis: all capacities, with a margin.
fn capacities(lines: &[Line]) -> (f64, f64) {
    let limited = lines.iter().filter(|line| !line.is_unlimited);
    let all = if limited.clone().count() == 0 { lines } else { &[] };
    let blocks = limited.chain(all).map(|line| to_f64(line.capacity_blocks.max(1).into()));
    let (least, most) = blocks
        .fold((f64::INFINITY, 1.0), |(least, most), n| (f64::min(least, n), f64::max(most, n)));
    let (least, most) = (least.min(most) / 1.5, most * 1.5);
    let (floor, ceil) = (least.log10().floor(), most.log10().ceil());
    // Labels are at powers of ten, and at one value between two of them.
    let has_two = most.log10().floor() - least.log10().ceil() >= 1.0;
    if has_two { (least, most) } else { (10_f64.powf(floor), 10_f64.powf(ceil)) }
}

/// Returns a curve for the device alone of every policy, and one for it and its tiers.
fn curves(lines: &[Line]) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for line in lines {
        let with_tiers = line.tiers.as_ref().map(|tiers| {
            let given = tiers.tiers.iter().filter(|tier| !tier.is_passage());
            let names = given.map(|tier| format!(" + {}", tier.tier));
            let name = format!("{}{}", line.policy, names.collect::<String>());
            (name, tiers.token_hit_ratio)
        });
        let alone = (line.policy.clone(), line.token_hit_ratio);
        for (name, ratio) in std::iter::once(alone).chain(with_tiers) {
            let point = (to_f64(line.capacity_blocks.into()), ratio);
            if let Some(curve) = curves.iter_mut().find(|curve| curve.name == name) {
                curve.points.push(point);
            } else {
                let is_level = line.is_unlimited;
                curves.push(Curve { name, points: vec![point], is_level });
            }
        }
    }
    for curve in &mut curves {
        curve.points.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    }
    curves
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(policy: &str, capacity_blocks: u32, token_hit_ratio: f64) -> Line {
        Line {
            policy: policy.to_owned(),
            capacity_blocks,
            token_hit_ratio,
            is_unlimited: policy == "infinite",
            hit_tokens: 0,
            total_tokens: 0,
            evictions: 0,
            ns_per_request: 0,
            peak_blocks: 0,
            requests: 0,
            refused_requests: 0,
            tiers: None,
        }
    }

    fn numbers(svg: &str, name: &str) -> Vec<i32> {
        let circles = svg.split("<circle ").skip(1);
        let number = |circle: &str| {
            let (_, rest) = circle.split_once(&format!("{name}=\"")).expect(name);
            rest.split('"').next().expect(name).parse().expect(name)
        };
        circles.map(number).collect()
    }

    #[test]
    fn every_policy_is_a_line_and_every_capacity_a_point() {
        let lines = [
            line("lru", 1000, 0.2),
            line("lru", 10, 0.1),
            line("infinite", 90_000, 0.5),
            line("min", 10, 0.3),
            line("min", 1000, 0.4),
        ];
        let svg = draw(&lines).expect("a plot");
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert_eq!(svg.matches("<circle ").count(), 4, "infinite has no capacity");
        for words in ["lru", "infinite", "min", "capacity, blocks"] {
            assert!(svg.contains(&format!("\n{words}\n")), "{words}: {svg}");
        }
        let (x, y) = (numbers(&svg, "cx"), numbers(&svg, "cy"));
        assert!(x[0] < x[1] && y[0] > y[1], "more blocks to the right, more hits above: {svg}");
        assert_eq!((x[0], x[1]), (x[2], x[3]));
        assert!(svg.contains("\n10\n") && svg.contains("\n1000\n"), "{svg}");
        assert!(y[2] < y[0] && y[3] < y[1]);
    }

    #[test]
    fn a_plot_of_one_point_is_possible() {
        let cases = [vec![], vec![line("infinite", 7, 0.0)], vec![line("lru", 1, 0.0)]];
        for lines in cases {
            let svg = draw(&lines).expect("a plot");
            assert!(svg.starts_with("<svg ") && svg.contains("\n1\n"), "{svg}");
        }
    }
}
