package labtest

import "testing"

// TestOtherSources: OtherBinary still finds all that it changes.
func TestOtherSources(t *testing.T) {
	if err := otherSources("../../..", t.TempDir()); err != nil {
		t.Fatal(err)
	}
}
