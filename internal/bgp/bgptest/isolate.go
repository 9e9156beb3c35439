package bgptest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const isolatedEnv = "PILASTER_TEST_ISOLATED"

// Isolate runs a test binary again in network and mount namespaces of its own, where tests can bind any address and
// port. TestMain calls it with m.Run. It needs root.
func Isolate(run func() int) int {
	if os.Getenv(isolatedEnv) != "" {
		if err := prepare(); err != nil {
			fmt.Fprintln(os.Stderr, "error: prepare the test's namespaces:", err)
			return 1
		}
		return run()
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), isolatedEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	err := cmd.Run()
	if failed := new(exec.ExitError); errors.As(err, &failed) {
		return failed.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error: run the test in namespaces of its own, which needs root:", err)
		return 1
	}
	return 0
}

func prepare() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}
