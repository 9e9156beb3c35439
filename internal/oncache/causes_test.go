package oncache

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestCausesAreDocumented: the reference explains each cause, and the guide says what to do about it, and about none
// that does not exist.
func TestCausesAreDocumented(t *testing.T) {
	for page, heading := range map[string]string{
		"../../docs/reference/accelerate.md": "## Misses",
		"../../docs/howto/accelerate.md":     "## If packets do not use it",
	} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		_, section, _ := strings.Cut(string(text), heading+"\n")
		section, _, _ = strings.Cut(section, "\n## ")
		var found []string
		for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*) \\|").FindAllStringSubmatch(section, -1) {
			for _, name := range regexp.MustCompile("`([a-z-]+)`").FindAllStringSubmatch(row[1], -1) {
				found = append(found, name[1])
			}
		}
		slices.Sort(found)
		want := slices.Concat(missCauses, notLearnt)
		slices.Sort(want)
		if found = slices.Compact(found); !slices.Equal(found, want) {
			t.Errorf("%s explains %q, want %q", page, found, want)
		}
	}
}
