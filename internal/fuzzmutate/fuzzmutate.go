// Package fuzzmutate makes questionable documents out of good ones. Fuzz targets use it: what mutation of bytes makes
// of a document hardly ever gets past its syntax, so the rules behind that would go untried.
package fuzzmutate

import (
	"bytes"
	"encoding/json"
	"hash/fnv"
	"maps"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
)

// Nothing is a script that changes nothing: a seed.
var Nothing = make([]byte, 4)

// most is how many edits a script makes: one may double the document.
const most = 6

// edit says which value, what becomes of it, and by how much.
type edit struct{ which, how, much byte }

// JSON applies the edits of a script to a document, in place of one that is no JSON to one of the good ones: there are
// soon many of the first kind among the inputs that fuzzing goes on from. With Nothing a text is returned as it is.
func JSON(text, script []byte, good ...string) []byte {
	edits := chosen(script)
	if len(edits) > 0 && len(good) > 0 && !json.Valid(text) {
		text = []byte(good[len(text)%len(good)])
	}
	return spoilt(text, edits)
}

// chosen returns the edits that a script stands for, mostly one. A hash of the whole script determines them, so the
// smallest change of the script gives different edits: Go's fuzzer would need long to find the few bytes that matter.
func chosen(script []byte) (edits []edit) {
	if len(bytes.Trim(script, "\x00")) == 0 {
		return nil
	}
	h := fnv.New64a()
	h.Write(script)
	for r := rand.New(rand.NewPCG(h.Sum64(), 0)); len(edits) == 0 || len(edits) < most && r.IntN(3) == 0; {
		n := r.Uint32()
		edits = append(edits, edit{byte(n >> 16), byte(n >> 8), byte(n)})
	}
	return edits
}

func spoilt(text []byte, edits []edit) []byte {
	var root any
	if len(edits) == 0 || decode(text, &root) != nil {
		return text
	}
	for _, e := range edits {
		places := below(place{root, func(v any) { root = v }})
		from, to := places[int(e.much)%len(places)], places[int(e.which)%len(places)]
		if object, ok := to.value.(map[string]any); ok && e.how%kinds > 1 {
			member(object, e.how, e.much)
		} else {
			to.set(edited(to.value, from.value, e.how, e.much))
		}
	}
	out, err := json.Marshal(root)
	if err != nil {
		return text
	}
	return out
}

func decode(text []byte, v *any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return d.Decode(v)
}

// place is a value of a document, and how another takes its place.
type place struct {
	value any
	set   func(any)
}

// below lists a value and all in it, always in the same order.
func below(p place) []place {
	all := []place{p}
	switch v := p.value.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			all = append(all, below(place{v[key], func(to any) { v[key] = to }})...)
		}
	case []any:
		for i := range v {
			all = append(all, below(place{v[i], func(to any) { v[i] = to }})...)
		}
	}
	return all
}

// kinds is how many things may become of a value: 0 null, 1 a copy of another, and those of its type.
const kinds = 8

func edited(v, other any, how, much byte) any {
	switch how % kinds {
	case 0:
		return nil
	case 1:
		return copied(other)
	}
	switch v := v.(type) {
	case json.Number:
		return number(v, how, much)
	case string:
		return text(v, how, much)
	case bool:
		return !v
	case []any:
		return list(v, how, much)
	}
	return []any{copied(v)}
}

// number goes a little up or down, to a power of two, or changes its sign.
func number(n json.Number, how, much byte) any {
	i, ok := new(big.Int).SetString(n.String(), 10)
	if !ok {
		return json.Number("0")
	}
	switch how % kinds {
	case 2, 3:
		i.Add(i, big.NewInt(int64(much%8)))
	case 4:
		i.Sub(i, big.NewInt(int64(much%8)))
	case 5:
		i.Lsh(big.NewInt(1), uint(much%66))
	case 6:
		i.SetInt64(int64(much))
	case 7:
		i.Neg(i)
	}
	return json.Number(i.String())
}

// text loses or gains a character, gets another in its place, or another case.
func text(s string, how, much byte) any {
	at := int(much) % (len(s) + 1)
	switch how % kinds {
	case 2, 3:
		return s[:at]
	case 4:
		return s + string(rune(much))
	case 5:
		return s[:at] + s[min(at+1, len(s)):]
	case 6:
		if at < len(s) {
			return s[:at] + string(rune(s[at]+1)) + s[at+1:]
		}
	case 7:
		return strings.ToUpper(s)
	}
	return ""
}

// list loses an element, or has one twice.
func list(v []any, how, much byte) any {
	if len(v) == 0 {
		return []any{nil}
	}
	at := int(much) % len(v)
	if how%2 == 0 {
		return slices.Delete(slices.Clone(v), at, at+1)
	}
	return append(slices.Clone(v), copied(v[at]))
}

// member takes a member of an object away, or gives its value another key.
func member(m map[string]any, how, much byte) {
	if len(m) == 0 {
		m[""] = nil
		return
	}
	key := slices.Sorted(maps.Keys(m))[int(much)%len(m)]
	was := m[key]
	delete(m, key)
	if how%2 == 0 {
		m[key+"x"] = was
	}
}

func copied(v any) (out any) {
	if text, err := json.Marshal(v); err == nil {
		_ = decode(text, &out)
	}
	return out
}
