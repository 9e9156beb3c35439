package host

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzMountinfo: a bpffs that we mounted is found again, and no other one is mistaken for it.
func FuzzMountinfo(f *testing.F) {
	f.Add("/sys/fs/bpf", "bpf", mountSource, "shared:7", true)
	f.Add("/run/a b", "bpf", mountSource, "", false)
	f.Add("/sys/fs/bpf", "bpf", "bpf", "", true)
	f.Fuzz(func(t *testing.T, place, kind, source, tag string, below bool) {
		if !filepath.IsAbs(place) || place != filepath.Clean(place) || strings.ContainsAny(kind+source+tag, " \n\r") ||
			tag == "-" {
			t.Skip("the kernel does not say that")
		}
		escaped := ""
		for _, b := range []byte(place) { // seq_path(9)
			if strings.IndexByte(" \t\n\\", b) >= 0 {
				escaped += fmt.Sprintf(`\%03o`, b)
			} else {
				escaped += string([]byte{b})
			}
		}
		dir := place
		if below {
			dir = filepath.Join(place, "pilaster")
		}
		text := "22 1 0:20 / /sys rw - sysfs sysfs rw\n" + fmt.Sprintf(
			"30 22 0:30 / %s rw,nosuid %s - %s %s rw,mode=700\n",
			escaped,
			tag,
			kind,
			source,
		) + "31 22 0:31 / /other rw - bpf none rw\n"
		want := ""
		if kind == "bpf" && source == mountSource {
			want = place
		}
		if got, err := mountOf(strings.NewReader(text), dir); len(text) < 1<<12 &&
			(err != nil || got != want) { // PATH_MAX
			t.Fatalf("mounted on %q, found %q, %v in\n%s", want, got, err, text)
		}
	})
}
