//! The host's own definition of the formats against the same limits.
use kv_core::LayerId;

use super::*;
use crate::oracle::Stored;

fn own() -> Recording {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/quant/real_kv/meta.json");
    let value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    read(&path, &value).unwrap()
}

/// Stores rows and reads them back on the host.
fn kept(recording: &Recording, rows: &Rows, given: &Calibration, at: (Plane, KvFormat)) -> Rows {
    let (plane, format) = at;
    let spec = recording.spec(plane, format).unwrap();
    let read = |all: &[Vec<f32>], which: Plane| -> Vec<Vec<f32>> {
        let layer = |(rows, layer): (&Vec<f32>, u16)| {
            let layout = spec.groups()[0].layouts()[usize::from(which == Plane::Value)];
            let stored = Stored::new(LayerId(layer), which, layout, Some(given)).unwrap();
            stored.read(&stored.kept(0, rows))
        };
        all.iter().zip(0..).map(layer).collect()
    };
    Rows { k: read(&rows.k, Plane::Key), v: read(&rows.v, Plane::Value), q: rows.q.clone() }
}

#[test]
fn the_definition_of_every_format_is_within_the_limits() {
    let recording = own();
    let rows = recording.rows().unwrap();
    let given = recording.calibration(&rows).unwrap();
    for plane in [Plane::Key, Plane::Value] {
        let expected = Expected::new(&recording, &rows, &given, plane).unwrap();
        for (format, gaussian) in gaussian::ERRORS {
            let kept = kept(&recording, &rows, &given, (plane, *format));
            let mut got = Vec::new();
            recording.heads(&kept, |_, heads| {
                let outputs = heads.iter().flat_map(|head| head.attend().1);
                got.push(outputs.map(|x| x as f32).collect());
            });
            let [error, limit] = expected.measure(&got, *gaussian).unwrap();
            let place = format!("{plane:?} as {format}: {error:.2e}, at most {limit:.2e}");
            assert!(error <= limit, "{place}");
            // One bit less is four times the error, which must not pass.
            assert!(error * 4.0 > 0.5 * limit, "{place}, a limit that is too wide");
        }
    }
}
