package datapath

import (
	"fmt"
	"os"
	"testing"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
)

// TestMain makes the tests load the object that PILASTER_TEST_OBJECT names, instead of the committed one: test/mutation
// links these tests once and runs them with many objects.
func TestMain(m *testing.M) {
	if path := os.Getenv("PILASTER_TEST_OBJECT"); path != "" {
		object, err := os.ReadFile(path)
		if err != nil {
			fmt.Fprintf(os.Stderr, "read PILASTER_TEST_OBJECT: %v\n", err)
			os.Exit(2)
		}
		bpfobj.Replace(object)
	}
	os.Exit(m.Run())
}
