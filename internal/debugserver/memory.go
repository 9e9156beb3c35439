package debugserver

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
)

// Memory is the memory of a process in bytes, after a garbage collection that returned free memory to the system.
type Memory struct {
	Heap       int64 `json:"liveHeapBytes"` // live objects
	Stacks     int64 `json:"stackBytes"`    // of goroutines
	Resident   int64 `json:"residentBytes"` // as the kernel counts it, including the pages of the executable
	Anonymous  int64 `json:"anonymousBytes"`
	Goroutines int   `json:"goroutines"`
}

// ServeMemory runs a garbage collection and serves the memory that is left in use.
func ServeMemory(w http.ResponseWriter, _ *http.Request) {
	m, err := measureMemory()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_ = json.NewEncoder(w).Encode(m)
}

func measureMemory() (m Memory, err error) {
	runtime.GC() // sync.Pool keeps its content until the second collection
	debug.FreeOSMemory()
	s := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/stacks:bytes"}}
	metrics.Read(s)
	m.Heap, m.Stacks, m.Goroutines = int64(s[0].Value.Uint64()), int64(s[1].Value.Uint64()), runtime.NumGoroutine()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return m, err
	}
	for _, of := range []struct {
		key string
		to  *int64
	}{{"VmRSS:", &m.Resident}, {"RssAnon:", &m.Anonymous}} {
		if *of.to, err = statusBytes(string(text), of.key); err != nil {
			return m, err
		}
	}
	return m, nil
}

// statusBytes reads a size from /proc/PID/status.
func statusBytes(text, key string) (int64, error) {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, key); ok {
			n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("the kernel does not tell %s", key)
}
