package endpoint

import (
	"os"
	"path/filepath"
)

// Peek reads the records below a store's directory one by one and changes nothing, by path. A
// record that cannot be used is nil.
func Peek(dir string) map[string]*Record {
	var paths []string
	for _, suffix := range []string{recordSuffix, markedSuffix} {
		// The pattern is a good one: there is no other error.
		more, _ := filepath.Glob(filepath.Join(dir, recordsFolder, "*"+suffix))
		paths = append(paths, more...)
	}
	records := map[string]*Record{}
	for _, path := range paths {
		records[path] = nil
		if b, err := os.ReadFile(path); err == nil {
			if r, err := DecodeRecord(b); err == nil {
				records[path] = &r
			}
		}
	}
	return records
}
