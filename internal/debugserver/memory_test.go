package debugserver

import (
	"encoding/json"
	"net/http/httptest"
	"runtime"
	"testing"
)

// TestMemory: the figures contain live memory, and not memory that was freed.
func TestMemory(t *testing.T) {
	ask := func() (m Memory) {
		w := httptest.NewRecorder()
		ServeMemory(w, httptest.NewRequest("GET", "/debug/memory", nil))
		if err := json.Unmarshal(w.Body.Bytes(), &m); err != nil {
			t.Fatalf("%v: %s", err, w.Body)
		}
		return m
	}
	const size = 32 << 20
	before := ask()
	kept := make([]byte, size)
	for i := range kept {
		kept[i] = 1
	}
	with := ask()
	runtime.KeepAlive(kept)
	kept = nil
	after := ask()
	if more := with.Heap - before.Heap; more < size || more > size+size/8 {
		t.Errorf("%d bytes are %d more of live heap", size, more)
	}
	if more := with.Resident - before.Resident; more < size/2 || with.Anonymous < size ||
		with.Resident < with.Anonymous {
		t.Errorf("before %+v, with %d bytes %+v", before, size, with)
	}
	if after.Heap > before.Heap+size/8 || after.Resident > with.Resident-size/2 || after.Stacks == 0 ||
		after.Goroutines == 0 {
		t.Errorf("before %+v, with %+v, after %+v", before, with, after)
	}
}
