// Package plottest checks the pages that package plot writes.
package plottest

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

// CheckPage requires a page that needs no other file, is well-formed, and has that many charts.
func CheckPage(t testing.TB, text string, plots int) {
	t.Helper()
	if n := strings.Count(text, "<svg "); n != plots {
		t.Errorf("%d plots", n)
	}
	for _, external := range []string{"http://", "https://", "src=", "href=", "url(", "@import", "NaN", "Inf"} {
		if strings.Contains(text, external) {
			t.Errorf("the page has %q", external)
		}
	}
	d := xml.NewDecoder(strings.NewReader(strings.Replace(text, "<!doctype html>", "", 1)))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("not well-formed: %v", err)
		}
	}
}
