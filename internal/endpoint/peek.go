package endpoint

import (
	"os"
	"path/filepath"
)

// Peek returns the records below a store's directory by their paths, and changes nothing. The value of an unusable
// record is nil.
func Peek(dir string) map[string]*Record {
	var paths []string
	for _, suffix := range []string{recordSuffix, markedSuffix} {
		// Glob fails only for a malformed pattern, and this one is well formed.
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
