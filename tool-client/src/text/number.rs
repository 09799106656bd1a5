//! Numbers as JavaScript prints them.

/// As `String(value)`: `150.5`, `1e-7`, `300`, `Infinity`.
#[must_use]
pub fn plain(value: f64) -> String {
    // JavaScript prints both zeros alike.
    let value = if value == 0.0 { 0.0 } else { value };
    ryu_js::Buffer::new().format(value).to_owned()
}

/// As `JSON.stringify(value)`: what JSON has no number for is `null`.
#[must_use]
pub fn json(value: f64) -> String {
    if value.is_finite() { plain(value) } else { "null".to_owned() }
}

/// The JSON value that [`json`] prints.
#[must_use]
pub fn value(value: f64) -> serde_json::Value {
    json(value).parse::<serde_json::Number>().map_or(serde_json::Value::Null, serde_json::Value::Number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_print_as_in_javascript() {
        let cases = [
            (300.0, "300"),
            (150.5, "150.5"),
            (1e-7, "1e-7"),
            (0.000_001, "0.000001"),
            (1e20, "100000000000000000000"),
            (1e21, "1e+21"),
            (-5.0, "-5"),
            (0.0, "0"),
            (-0.0, "0"),
            (123_456_789.125, "123456789.125"),
            (f64::MAX, "1.7976931348623157e+308"),
            (f64::MIN_POSITIVE, "2.2250738585072014e-308"),
        ];
        for (number, text) in cases {
            assert_eq!(plain(number), text);
            assert_eq!(json(number), text);
            assert_eq!(value(number).to_string(), text);
        }
        assert_eq!(json(f64::INFINITY), "null");
        assert_eq!(json(f64::NEG_INFINITY), "null");
        assert_eq!(value(f64::INFINITY), serde_json::Value::Null);
    }

    proptest! {
        #[test]
        fn a_printed_number_reads_as_itself(number in any::<f64>().prop_filter("finite", |number| number.is_finite())) {
            prop_assert_eq!(plain(number).parse::<f64>().ok(), Some(number));
        }
    }
}
