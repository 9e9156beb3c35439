package labtest

import "testing"

// TestOtherSources: all of OtherBinary's expressions still match the sources.
func TestOtherSources(t *testing.T) {
	if err := otherSources("../../..", t.TempDir()); err != nil {
		t.Fatal(err)
	}
}
