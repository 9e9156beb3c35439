package fuzzmutate

import (
	"encoding/json"
	"slices"
	"testing"
)

func TestEdits(t *testing.T) {
	const good = `{"a": 7, "b": ["x", "yz"], "c": true}` // places: all, a, b, x, yz, c
	for _, c := range []struct {
		script, want string
	}{
		{"", good},
		{"\x01\x03\x01", `{"a":8,"b":["x","yz"],"c":true}`},
		{"\x01\x04\x09", `{"a":6,"b":["x","yz"],"c":true}`},
		{"\x01\x05\x40", `{"a":18446744073709551616,"b":["x","yz"],"c":true}`},
		{"\x01\x07\x00", `{"a":-7,"b":["x","yz"],"c":true}`},
		{"\x01\x00\x00", `{"a":null,"b":["x","yz"],"c":true}`},
		{"\x01\x01\x02", `{"a":["x","yz"],"b":["x","yz"],"c":true}`},
		{"\x02\x03\x01", `{"a":7,"b":["x","yz","yz"],"c":true}`},
		{"\x02\x04\x00", `{"a":7,"b":["yz"],"c":true}`},
		{"\x03\x04\x21", `{"a":7,"b":["x!","yz"],"c":true}`},
		{"\x04\x06\x00", `{"a":7,"b":["x","zz"],"c":true}`},
		{"\x04\x07\x00", `{"a":7,"b":["x","YZ"],"c":true}`},
		{"\x05\x03\x00", `{"a":7,"b":["x","yz"],"c":false}`},
		{"\x00\x03\x02", `{"a":7,"b":["x","yz"]}`},
		{"\x00\x04\x00", `{"ax":7,"b":["x","yz"],"c":true}`},
		{"\x01\x03\x01\x03\x00\x00", `{"a":8,"b":[null,"yz"],"c":true}`},
	} {
		var edits []edit
		for e := range slices.Chunk([]byte(c.script), 3) {
			edits = append(edits, edit{e[0], e[1], e[2]})
		}
		if got := string(spoilt([]byte(good), edits)); got != c.want {
			t.Errorf("%x made %s, not %s", c.script, got, c.want)
		}
	}
}

// Scripts of two bytes reach every edit of a small document, or fuzzing would pass some over.
func TestScriptsReachEveryEdit(t *testing.T) {
	const places, amounts = 20, 8
	reached := map[edit]bool{}
	for n := range 1 << 16 {
		for _, e := range chosen([]byte{byte(n >> 8), byte(n)}) {
			reached[edit{e.which % places, e.how % kinds, e.much % amounts}] = true
		}
	}
	if len(reached) != places*kinds*amounts {
		t.Errorf("%d edits of %d", len(reached), places*kinds*amounts)
	}
	if got := string(JSON([]byte(`{"a": 7}`), Nothing)); got != `{"a": 7}` {
		t.Errorf("nothing made %s", got)
	}
	if got := string(JSON([]byte(`{"a"`), Nothing, "[7]")); got != `{"a"` {
		t.Errorf("nothing made %s", got)
	}
	if got := JSON([]byte(`{"a"`), []byte{1, 1}, "[7]"); !json.Valid(got) || string(got) == "[7]" {
		t.Errorf("an edit made %s", got)
	}
}

// FuzzJSON: JSON stays JSON, by the same edits the same, and what is none stays what it is.
func FuzzJSON(f *testing.F) {
	f.Add([]byte(`{"a": 7, "b": ["x", {"c": null}], "d": -1.5e3}`), Nothing)
	f.Fuzz(func(t *testing.T, text, script []byte) {
		got := JSON(text, script)
		if valid := json.Valid(text); valid && !json.Valid(got) {
			t.Fatalf("%q became %q", text, got)
		}
		if again := JSON(text, script); string(again) != string(got) {
			t.Fatalf("%q became %q and then %q", text, got, again)
		}
	})
}
