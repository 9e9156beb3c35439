package device

import (
	"errors"
	"fmt"
	"os"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// ErrNetnsNotFound means that no visible namespace is the container's.
var ErrNetnsNotFound = errors.New("no visible namespace is the container's")

// forEachNetns calls f in the containers' namespaces. Namespaces whose path only the runtime sees are found by one walk
// through all namespaces of the machine. It returns the errors by endpoint.
func (d *Devices) forEachNetns(
	k deviceDriver,
	records []endpoint.Record,
	f func(endpoint.Record, *ContainerNS) error,
) map[endpoint.ID]error {
	errs := map[endpoint.ID]error{}
	do := func(r endpoint.Record, in *ContainerNS) {
		if err := f(r, in); err != nil {
			errs[r.ID] = err
		}
	}
	elsewhere := map[int][]endpoint.Record{}
	for _, r := range records {
		home, err := k.netnsID(r)
		if err != nil {
			errs[r.ID] = err
			continue
		}
		err = inNetns(r.Netns, func(in *ContainerNS) error {
			if there, err := k.netnsIDOf(in); err != nil || there != home {
				return ErrNetnsNotFound
			}
			do(r, in)
			return nil
		})
		if isNetnsGone(err) || errors.Is(err, ErrNetnsNotFound) {
			elsewhere[home] = append(elsewhere[home], r)
		} else if err != nil {
			errs[r.ID] = err
		}
	}
	if len(elsewhere) == 0 {
		return errs
	}
	err := WalkNetns(func(_ string, in *ContainerNS) (enough bool, err error) {
		if home, err := k.netnsIDOf(in); err == nil {
			for _, r := range elsewhere[home] {
				do(r, in)
			}
			delete(elsewhere, home)
		}
		return len(elsewhere) == 0, nil
	})
	for _, missing := range elsewhere {
		for _, r := range missing {
			if errs[r.ID] = err; err == nil {
				errs[r.ID] = fmt.Errorf("namespace %s: %w", r.Netns, ErrNetnsNotFound)
			}
		}
	}
	return errs
}

func inNetns(path string, f func(*ContainerNS) error) error {
	in, err := OpenContainerNS(path)
	if err != nil {
		return err
	}
	defer in.Close()
	return f(in)
}

// WalkNetns opens each namespace of the machine except the calling thread's, until f has seen enough.
func WalkNetns(f func(path string, in *ContainerNS) (enough bool, err error)) error {
	paths, err := netns.Others()
	if err != nil {
		return err
	}
	for _, path := range paths {
		in, err := OpenContainerNS(path)
		if isNetnsGone(err) || errors.Is(err, os.ErrPermission) {
			continue // or only its owner can read its file system
		}
		enough := false
		if err == nil {
			enough, err = f(path, in)
			in.Close()
		}
		if err != nil {
			return fmt.Errorf("open the namespace %s: %w", path, err)
		}
		if enough {
			break
		}
	}
	return nil
}

// isNetnsGone reports whether the path of a namespace no longer leads to one.
func isNetnsGone(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, netns.ErrNone)
}
