//! Reads a model's JSON text as JavaScript's `JSON.parse` does.
//!
//! Why not serde_json: a number must become the double that JavaScript makes of it, an infinite one too; a lone surrogate
//! escape must become U+FFFD; and the features of serde_json that keep numbers whole give one key a meaning of its own.

/// Arrays and objects may be nested this deep, so that no text can exhaust the stack.
pub(crate) const MAX_DEPTH: usize = 128;

/// A value. Arrays keep nothing of what is in them: no argument of the tools is one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Number(f64),
    String(String),
    Array,
    /// In the order of the text; of equal keys the last one counts.
    Object(Vec<(String, Json)>),
}

/// Parses a whole text; `None`: `JSON.parse` would throw, or it is nested too deeply.
pub(crate) fn parse(text: &str) -> Option<Json> {
    let mut parser = Parser { text, at: 0 };
    let value = parser.value(0)?;
    parser.blanks();
    (parser.at == text.len()).then_some(value)
}

struct Parser<'a> {
    text: &'a str,
    /// Always on a character boundary.
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// Takes this ASCII byte if it is next.
    fn take(&mut self, byte: u8) -> Option<()> {
        (self.peek() == Some(byte)).then(|| self.at += 1)
    }

    fn take_word(&mut self, word: &str) -> Option<()> {
        self.text[self.at..].starts_with(word).then(|| self.at += word.len())
    }

    fn blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn value(&mut self, depth: usize) -> Option<Json> {
        self.blanks();
        match self.peek()? {
            b'{' => self.object(depth + 1),
            b'[' => self.array(depth + 1),
            b'"' => self.string().map(Json::String),
            b't' => self.take_word("true").map(|()| Json::Bool(true)),
            b'f' => self.take_word("false").map(|()| Json::Bool(false)),
            b'n' => self.take_word("null").map(|()| Json::Null),
            _ => self.number().map(Json::Number),
        }
    }

    fn object(&mut self, depth: usize) -> Option<Json> {
        self.open(b'{', depth)?;
        let mut members = Vec::new();
        if self.take(b'}').is_some() {
            return Some(Json::Object(members));
        }
        loop {
            self.blanks();
            let key = self.string()?;
            self.blanks();
            self.take(b':')?;
            members.push((key, self.value(depth)?));
            if self.closes(b'}')? {
                return Some(Json::Object(members));
            }
        }
    }

    fn array(&mut self, depth: usize) -> Option<Json> {
        self.open(b'[', depth)?;
        if self.take(b']').is_some() {
            return Some(Json::Array);
        }
        loop {
            self.value(depth)?;
            if self.closes(b']')? {
                return Some(Json::Array);
            }
        }
    }

    fn open(&mut self, bracket: u8, depth: usize) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.take(bracket)?;
        self.blanks();
        Some(())
    }

    /// After a member: whether the bracket follows, or a comma and so another member.
    fn closes(&mut self, bracket: u8) -> Option<bool> {
        self.blanks();
        if self.take(bracket).is_some() {
            return Some(true);
        }
        self.take(b',').map(|()| false)
    }

    fn number(&mut self) -> Option<f64> {
        let start = self.at;
        let _ = self.take(b'-');
        if self.take(b'0').is_none() {
            self.digits()?;
        }
        if self.take(b'.').is_some() {
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        // Rust reads the nearest double, and infinity where there is none, as JavaScript does.
        self.text[start..self.at].parse().ok()
    }

    /// At least one digit.
    fn digits(&mut self) -> Option<()> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        (self.at > start).then_some(())
    }

    fn string(&mut self) -> Option<String> {
        self.take(b'"')?;
        let mut value = String::new();
        loop {
            let plain =
                self.text.as_bytes()[self.at..].iter().position(|byte| matches!(byte, b'"' | b'\\' | ..=0x1f))?;
            value.push_str(&self.text[self.at..self.at + plain]);
            self.at += plain;
            if self.take(b'"').is_some() {
                return Some(value);
            }
            // A control character is not allowed in a string.
            self.take(b'\\')?;
            value.push(self.escape()?);
        }
    }

    fn escape(&mut self) -> Option<char> {
        let byte = self.peek()?;
        let character = match byte {
            b'"' | b'\\' | b'/' => char::from(byte),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                self.at += 1;
                return self.code_unit().map(|unit| self.character(unit));
            }
            _ => return None,
        };
        self.at += 1;
        Some(character)
    }

    /// The character that begins with a UTF-16 code unit. A surrogate without its other half becomes U+FFFD, as it does
    /// when JavaScript encodes it.
    fn character(&mut self, unit: u16) -> char {
        let after_unit = self.at;
        let low =
            if matches!(unit, 0xd800..=0xdbff) && self.take_word("\\u").is_some() { self.code_unit() } else { None };
        if let Some(low @ 0xdc00..=0xdfff) = low
            && let Some(Ok(pair)) = char::decode_utf16([unit, low]).next()
        {
            return pair;
        }
        // What follows is read on its own, also where it is no escape at all.
        self.at = after_unit;
        char::from_u32(u32::from(unit)).unwrap_or(char::REPLACEMENT_CHARACTER)
    }

    fn code_unit(&mut self) -> Option<u16> {
        let digits = self.text.as_bytes().get(self.at..self.at + 4)?;
        let mut unit = 0;
        for digit in digits {
            unit = unit << 4 | u16::try_from(char::from(*digit).to_digit(16)?).ok()?;
        }
        self.at += 4;
        Some(unit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn string(text: &str) -> Option<Json> {
        Some(Json::String(text.to_owned()))
    }

    #[test]
    fn numbers_are_the_doubles_of_javascript() {
        let cases = [
            ("0", 0.0),
            ("-0", -0.0),
            ("1.5e3", 1500.0),
            ("1E+2", 100.0),
            ("1e999", f64::INFINITY),
            ("-1e999", f64::NEG_INFINITY),
            ("1e-999", 0.0),
            ("9007199254740993", 9_007_199_254_740_992.0),
            ("123456789012345678901234567890", 123_456_789_012_345_680_000_000_000_000.0),
            ("1e99999999999999999999", f64::INFINITY),
        ];
        for (text, number) in cases {
            assert_eq!(parse(text), Some(Json::Number(number)), "{text}");
        }
    }

    #[test]
    fn what_json_parse_refuses_does_not_parse() {
        let refused = [
            "",
            " ",
            "\u{feff}{}",
            "{}\u{a0}",
            "\u{b}1",
            "\u{c}1",
            "01",
            "-",
            "-01",
            "+1",
            "1.",
            ".5",
            "1e",
            "1e+",
            "0x1",
            "NaN",
            "Infinity",
            "undefined",
            "nul",
            "truee",
            "'a'",
            "{a:1}",
            "{'a':1}",
            "{\"a\"}",
            "{\"a\":1,}",
            "{,}",
            "[1,]",
            "[,1]",
            "[1 2]",
            "{} {}",
            "[",
            "{",
            "\"",
            "\"\\",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\u12g4\"",
            "\"\\u+123\"",
            "\"a\nb\"",
            "\"\t\"",
            "\"\0\"",
            "\"\u{1f}\"",
            "/**/{}",
            "{}//",
            "\"\\uD83D\\u12\"",
            "\"\\uD83D\\u\"",
        ];
        for text in refused {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn strings_and_blanks_are_read_as_json() {
        assert_eq!(parse(" \t\r\n\"a\" \t\r\n"), string("a"));
        assert_eq!(parse(r#""\"\\\/\b\f\n\r\t\u0041\u00e9\u0000""#), string("\"\\/\u{8}\u{c}\n\r\tA\u{e9}\0"));
        assert_eq!(parse("\"\u{7f}\u{2028}\u{feff}\u{10ffff}\""), string("\u{7f}\u{2028}\u{feff}\u{10ffff}"));
    }

    #[test]
    fn a_lone_surrogate_becomes_the_replacement_character() {
        let cases = [
            (r#""\ud83d\ude00""#, "\u{1f600}"),
            (r#""\uDBFF\uDFFF""#, "\u{10ffff}"),
            (r#""\ud83d""#, "\u{fffd}"),
            (r#""\ude00""#, "\u{fffd}"),
            (r#""\ud83dx""#, "\u{fffd}x"),
            (r#""\ud83d\n""#, "\u{fffd}\n"),
            (r#""\ud83d\u0041""#, "\u{fffd}A"),
            (r#""\ude00\ud83d""#, "\u{fffd}\u{fffd}"),
            (r#""\ud83d\ud83d\ude00""#, "\u{fffd}\u{1f600}"),
            (r#""\ufffd\ud800""#, "\u{fffd}\u{fffd}"),
        ];
        for (text, value) in cases {
            assert_eq!(parse(text), string(value), "{text}");
        }
        assert_eq!(parse(r#"{"\ud800":1}"#), Some(Json::Object(vec![("\u{fffd}".to_owned(), Json::Number(1.0))])));
    }

    #[test]
    fn nesting_ends_at_its_bound() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(parse(&nested(MAX_DEPTH)), Some(Json::Array));
        assert_eq!(parse(&nested(MAX_DEPTH + 1)), None);
        assert_eq!(parse(&"[".repeat(5_000_000)), None);
        let objects = |depth: usize| format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth));
        assert!(parse(&objects(MAX_DEPTH)).is_some());
        assert_eq!(parse(&objects(MAX_DEPTH + 1)), None);
    }

    /// The same value as serde_json would give it to this module's type.
    fn of_serde(value: &serde_json::Value) -> Json {
        match value {
            serde_json::Value::Null => Json::Null,
            serde_json::Value::Bool(bool) => Json::Bool(*bool),
            serde_json::Value::Number(number) => Json::Number(number.to_string().parse().expect("a number")),
            serde_json::Value::String(text) => Json::String(text.clone()),
            serde_json::Value::Array(_) => Json::Array,
            serde_json::Value::Object(map) => {
                Json::Object(map.iter().map(|(key, value)| (key.clone(), of_serde(value))).collect())
            }
        }
    }

    /// Texts that are JSON or nearly so.
    fn nearly_json() -> impl Strategy<Value = String> {
        let token = prop_oneof![
            Just("{".to_owned()),
            Just("}".to_owned()),
            Just("[".to_owned()),
            Just("]".to_owned()),
            Just(",".to_owned()),
            Just(":".to_owned()),
            Just("\"".to_owned()),
            Just("\\".to_owned()),
            Just("\"a\"".to_owned()),
            Just("\"a\":".to_owned()),
            Just("\"\\u00".to_owned()),
            Just("null".to_owned()),
            Just("true".to_owned()),
            "-?[0-9]{0,3}(\\.[0-9]{0,2})?([eE][+-]?[0-9]{0,2})?",
            "[ \t\r\n]",
            "\\PC",
        ];
        proptest::collection::vec(token, 0..12).prop_map(|tokens| tokens.concat())
    }

    proptest! {
        #[test]
        fn texts_are_taken_or_refused_as_by_serde_json(text in nearly_json()) {
            let serde = serde_json::from_str::<serde_json::Value>(&text).ok();
            let ours = parse(&text);
            prop_assert_eq!(ours.is_some(), serde.is_some());
            // Of equal keys serde_json keeps one.
            if let (Some(ours), Some(serde)) = (ours, serde)
                && serde.as_object().is_none_or(|map| map.len() == text.matches(':').count())
                && !text.contains('[')
            {
                prop_assert_eq!(ours, of_serde(&serde));
            }
        }

        #[test]
        fn a_printed_string_reads_as_itself(value in any::<String>()) {
            let text = serde_json::to_string(&value).expect("strings can be printed");
            prop_assert_eq!(parse(&text), Some(Json::String(value)));
        }

        #[test]
        fn no_text_is_a_panic(text in any::<String>()) {
            let _ = parse(&text);
            let _ = parse(&format!("\"\\u{text}"));
            let _ = parse(&format!("{{\"{text}\":{text}"));
        }
    }
}
