//! Divergence against bits per value as SVG, one labelled point per format.
use anyhow::anyhow;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::{
    BLACK, BLUE, Cartesian2d, ChartBuilder, ChartContext, Circle, Color, IntoDrawingArea, IntoFont,
    IntoLogRange, LogCoord, PathElement, SVGBackend, TextStyle, WHITE,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};

const SIZE: (u32, u32) = (960, 640);
/// Estimated width and height of a label's letters in pixels; the viewer chooses the font.
const LETTER: (i32, i32) = (7, 13);
/// Pixels between a point and its label.
const GAP: i32 = 8;

type Chart<'d, 's> = ChartContext<'d, SVGBackend<'s>, Cartesian2d<RangedCoordf64, LogCoord<f64>>>;

/// Draws points with a label, bits per value and divergence. A divergence of 0 is drawn at the
/// lower edge, because it has no logarithm.
pub(super) fn draw(points: &[(String, f64, f64)]) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let failed = |error: &dyn std::fmt::Display| anyhow!("the plot: {error}");
        area.fill(&WHITE).map_err(|error| failed(&error))?;
        let (bits, kld) = ranges(points);
        let floor = kld.0;
        let mut chart = ChartBuilder::on(&area)
            .caption("KL divergence from an f32 cache", ("sans-serif", 18))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(72)
            .build_cartesian_2d(bits.0..bits.1, (kld.0..kld.1).log_scale())
            .map_err(|error| failed(&error))?;
        chart
            .configure_mesh()
            .max_light_lines(4)
            .x_desc("stored bits per value, scales included")
            .y_desc("mean KL divergence, nats")
            .y_label_formatter(&|kld| format!("{kld:.0e}"))
            .draw()
            .map_err(|error| failed(&error))?;
        let points: Vec<_> = points
            .iter()
            .map(|(label, bits, kld)| (label.as_str(), *bits, kld.max(floor)))
            .collect();
        draw_points(&mut chart, &points).map_err(|error| failed(&error))?;
        area.present().map_err(|error| failed(&error))?;
    }
    Ok(svg)
}

fn draw_points(
    chart: &mut Chart<'_, '_>,
    points: &[(&str, f64, f64)],
) -> Result<(), Box<dyn std::error::Error>> {
    let circles = points.iter().map(|(_, bits, kld)| Circle::new((*bits, *kld), 4, BLUE.filled()));
    chart.draw_series(circles)?;
    let pixels: Vec<_> =
        points.iter().map(|(_, bits, kld)| chart.backend_coord(&(*bits, *kld))).collect();
    let labels: Vec<_> = points.iter().map(|(label, ..)| *label).collect();
    let area = chart.plotting_area().strip_coord_spec();
    let (left, top) = area.get_base_pixel();
    let font = TextStyle::from(("sans-serif", 13).into_font()).color(&BLACK);
    for ((label, place), point) in labels.iter().zip(place(&labels, &pixels)).zip(&pixels) {
        let inside = |(x, y): (i32, i32)| (x.saturating_sub(left), y.saturating_sub(top));
        // On the side of the point, the error of the estimated width must not show.
        let (x, side) = if place.x < point.0 {
            (place.x + place.width, HPos::Right)
        } else {
            (place.x, HPos::Left)
        };
        let font = font.pos(Pos::new(side, VPos::Top));
        area.draw_text(label, &font, inside((x, place.y)))?;
        if place.is_far {
            let line = [inside(*point), inside(place.near(*point))];
            area.draw(&PathElement::new(line, BLACK.mix(0.4)))?;
        }
    }
    Ok(())
}

/// Returns axes with room for labels: at least from 2 to 10 bits, and whole powers of ten.
fn ranges(points: &[(String, f64, f64)]) -> ((f64, f64), (f64, f64)) {
    let bits = points.iter().map(|(_, bits, _)| *bits);
    let most = bits.clone().fold(10.0, f64::max);
    let least = bits.fold(2.0, f64::min);
    let kld = points.iter().map(|(.., kld)| *kld).filter(|kld| *kld > 0.0);
    let (low, high) = (kld.clone().fold(f64::INFINITY, f64::min), kld.fold(0.0, f64::max));
    let (low, high) = if high > 0.0 { (low.max(1e-12), high.max(1e-12)) } else { (1e-6, 1.0) };
    let decade = |x: f64| 10_f64.powf(x);
    // At least a tenth of a decade between a point and the edge.
    let kld = (decade((low.log10() - 0.1).floor()), decade((high.log10() + 0.1).ceil()));
    ((least, most + (most - least) * 0.12), kld)
}

/// The place of a label: its upper left corner in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Label {
    x: i32,
    y: i32,
    width: i32,
    /// Whether the label needs a line to its point.
    is_far: bool,
}

impl Label {
    fn overlaps(&self, x: i32, y: i32, width: i32, height: i32) -> bool {
        self.x < x + width
            && x < self.x + self.width
            && self.y < y + height
            && y < self.y + LETTER.1
    }

    /// Returns the end of its middle line that is nearer to a point.
    fn near(&self, (x, _): (i32, i32)) -> (i32, i32) {
        let right = self.x + self.width;
        let end = if x <= self.x { self.x } else { right.min(x).max(self.x) };
        (end, self.y + LETTER.1.div_euclid(2))
    }
}

/// Places every label next to its point without covering a point or an earlier label.
fn place(labels: &[&str], points: &[(i32, i32)]) -> Vec<Label> {
    let mut placed: Vec<Label> = Vec::with_capacity(labels.len());
    for (label, (x, y)) in labels.iter().zip(points) {
        let letters = i32::try_from(label.chars().count()).unwrap_or(i32::MAX);
        let width = letters * LETTER.0;
        let middle = y.saturating_sub(LETTER.1.div_euclid(2));
        let right = x + GAP;
        let left = x.saturating_sub(GAP).saturating_sub(width);
        let steps = (0..40_i32).flat_map(|step| [step, step.saturating_neg()]);
        let candidates = steps.flat_map(|step| {
            let y = middle + step * LETTER.1;
            [right, left].map(|x| Label { x, y, width, is_far: step != 0 })
        });
        let is_free = |label: &Label| {
            let Label { x, y, width, .. } = *label;
            let (radius, diameter) = (4, 8);
            let covers_point = points.iter().any(|(px, py)| {
                let (px, py) = (px.saturating_sub(radius), py.saturating_sub(radius));
                label.overlaps(px, py, diameter, diameter)
            });
            let fits = x >= 0
                && y >= 0
                && x + width <= i32::try_from(SIZE.0).unwrap_or(i32::MAX)
                && y + LETTER.1 <= i32::try_from(SIZE.1).unwrap_or(i32::MAX);
            fits && !covers_point && !placed.iter().any(|p| p.overlaps(x, y, width, LETTER.1))
        };
        let fallback = Label { x: right, y: middle, width, is_far: false };
        let label = candidates.clone().find(is_free).unwrap_or(fallback);
        placed.push(label);
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(label: &str, bits: f64, kld: f64) -> (String, f64, f64) {
        (label.to_owned(), bits, kld)
    }

    #[test]
    fn every_format_is_a_labelled_point() {
        let points = [
            point("f32", 32.0, 0.0),
            point("int8/l4", 6.25, 0.004),
            point("l3 & <more>", 3.25, 0.1),
            point("int8", 8.25, 9e-5),
        ];
        let svg = draw(&points).expect("a plot");
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert_eq!(svg.matches("<circle ").count(), points.len());
        for label in ["f32", "int8/l4", "l3 &amp; &lt;more&gt;", "int8", "1e-5", "1e0"] {
            assert!(svg.contains(&format!("\n{label}\n")), "{label}: {svg}");
        }
    }

    #[test]
    fn nothing_to_draw_is_an_empty_plot() {
        for points in [&[][..], &[point("f32", 32.0, 0.0)]] {
            let svg = draw(points).expect("a plot");
            assert_eq!(svg.matches("<circle ").count(), points.len());
        }
    }

    #[test]
    fn more_divergence_is_higher_up() {
        let svg = draw(&[point("a", 4.0, 1e-3), point("b", 8.0, 1e-1)]).expect("a plot");
        let number = |circle: &str, name: &str| {
            let (_, rest) = circle.split_once(&format!("{name}=\"")).expect(name);
            rest.split('"').next().expect(name).parse::<i32>().expect(name)
        };
        let circles: Vec<_> = svg.split("<circle ").skip(1).collect();
        assert!(number(circles[0], "cx") < number(circles[1], "cx"));
        assert!(number(circles[0], "cy") > number(circles[1], "cy"));
    }

    #[test]
    fn labels_of_close_points_do_not_cover_each_other() {
        let names = ["fp8-e4m3", "fp8-e4m3-row", "int8", "int8-head", "int8-tensor", "fp8-e5m2"];
        let points: Vec<_> = (0..).map(|i| (300 + i, 200 + i)).take(names.len()).collect();
        let labels = place(&names, &points);
        assert_eq!(labels.len(), names.len());
        for (index, label) in labels.iter().enumerate() {
            for other in &labels[..index] {
                assert!(!label.overlaps(other.x, other.y, other.width, LETTER.1), "{labels:?}");
            }
            for (x, y) in &points {
                assert!(!label.overlaps(x - 4, y - 4, 8, 8), "{labels:?}");
            }
        }
    }
}
