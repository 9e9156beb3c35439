package version

import (
	"regexp"
	"runtime/debug"
	"testing"
)

func TestCurrentHasRelease(t *testing.T) {
	if b := Current(); !regexp.MustCompile(`^v\d+\.\d+\.\d+(-dev)?$`).MatchString(b.Release) {
		t.Errorf("release %q", b.Release)
	}
}

func TestText(t *testing.T) {
	const commit = "6105057a1b2c3d4e5f60718293a4b5c6d7e8f901"
	recorded := Recorded(&debug.BuildInfo{Settings: []debug.BuildSetting{
		{Key: "vcs", Value: "git"}, {Key: "vcs.revision", Value: commit},
		{Key: "vcs.time", Value: "2026-11-23T22:00:00Z"}, {Key: "vcs.modified", Value: "true"},
	}})
	if want := (Build{Commit: commit, Modified: true, Time: "2026-11-23T22:00:00Z"}); recorded != want {
		t.Errorf("recorded %+v, want %+v", recorded, want)
	}
	for _, c := range []struct {
		build              Build
		text, descriptions string
	}{
		{Build{}, "", ""},
		{Build{Release: "v0.1.0"}, "v0.1.0", "v0.1.0"},
		{Build{Release: "v0.1.0", Commit: commit}, "v0.1.0+6105057a1b2c", "v0.1.0 (commit 6105057a1b2c)"},
		{Build{Release: "v0.1.0", Commit: commit, Modified: true},
			"v0.1.0+6105057a1b2c.modified", "v0.1.0 (commit 6105057a1b2c, modified)"},
		{recorded, "+6105057a1b2c.modified", "commit 6105057a1b2c, modified"},
		{Build{Release: "v0.1.0", Commit: "abc"}, "v0.1.0+abc", "v0.1.0 (commit abc)"},
	} {
		if got := c.build.String(); got != c.text {
			t.Errorf("%+v as text: %q, want %q", c.build, got, c.text)
		}
		if got := c.build.Describe(); got != c.descriptions {
			t.Errorf("%+v described: %q, want %q", c.build, got, c.descriptions)
		}
	}
}
