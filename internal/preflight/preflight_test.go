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
			t.Errorf("%s: %+v", release, got)
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
			t.Errorf("%v: %+v", ahead, got)
		}
		if late := ahead > 0; want != OK && late != strings.Contains(got.Says, " behind ") {
			t.Errorf("%v: %+v", ahead, got)
		}
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	for said, want := range map[string]Result{
		"it is broken": {State: Fail, Says: "it is broken", Do: "mend it"},
		"private prefix is taken\n  nothing was changed; choose another": {State: Fail,
			Says: "private prefix is taken", Do: "choose another"},
	} {
		if got := failed(errors.New(said), "mend it"); got != want {
			t.Errorf("%q became %+v", said, got)
		}
	}
}

// Without the rights no kernel lists programs, and a newer one does not either.
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
	if want := (Result{State: Fail, Says: "not tried", Do: "see privileges"}); err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}
