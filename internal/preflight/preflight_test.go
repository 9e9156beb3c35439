package preflight

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

func TestKernelVersion(t *testing.T) {
	for release, want := range map[string]State{
		"6.12.0": OK, "6.12-rc1": OK, "6.18.44-fc": OK, "7.0.1": OK, "6.11.9": Fail, "5.15.0-91-generic": Fail,
		"Linux": Fail,
	} {
		if got := kernelVersion(release); got.State != want || (want == Fail) != (got.Do != "") {
			t.Errorf("%s: %+v, want %s", release, got, want)
		}
	}
}

func TestClocks(t *testing.T) {
	for ahead, want := range map[time.Duration]State{
		0: OK, -9 * time.Second: OK, 11 * time.Second: Warn, -time.Minute: Warn, 2 * time.Hour: Fail,
		-2 * time.Hour: Fail,
	} {
		got := compare(ahead)
		if got.State != want {
			t.Errorf("%v: %+v, want %s", ahead, got, want)
		}
		if late := ahead > 0; want != OK && late != strings.Contains(got.Says, " behind ") {
			t.Errorf("%v: %+v, want behind: %v", ahead, got, late)
		}
	}
}

func TestAdviceOfErrors(t *testing.T) {
	for said, want := range map[string]Result{
		"it is broken": {State: Fail, Says: "it is broken", Do: "fix it"},
		"private prefix is taken\n  nothing was changed; choose another": {State: Fail,
			Says: "private prefix is taken", Do: "choose another"},
	} {
		if got := failed(errors.New(said), "fix it"); got != want {
			t.Errorf("failed(%q): %+v, want %+v", said, got, want)
		}
	}
}

// Without privileges, the kernel lists no programs. In this case the check must not report that the kernel is too old.
func TestOtherProgramsWithoutRights(t *testing.T) {
	var got Result
	err := netns.OnThread(func() error {
		header, none := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
		if err := unix.Capset(&header, &none[0]); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		got = otherPrograms(lo, t.TempDir(), privileges())
		return nil
	})
	if want := (Result{State: Fail, Says: "not tested", Do: "see privileges"}); err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}
