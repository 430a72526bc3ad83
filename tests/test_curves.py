import pytest

from headrace.curves import c10, curve_summary, end_reward, mean_area, moving_average, paired_points, trapezoid_area


def test_the_household_area_is_the_mean_of_neighbouring_means():
    assert trapezoid_area([0.2, 0.4, 1.0]) == pytest.approx((0.3 + 0.7) / 2)
    assert trapezoid_area([0.3]) == 0.3


def test_the_math_area_is_the_mean_of_points_of_two_updates():
    assert paired_points([0.2, 0.4, 0.6, 1.0, 0.5]) == pytest.approx([0.3, 0.8])
    assert mean_area([0.3, 0.8]) == pytest.approx(0.55)


def test_the_end_reward_is_the_mean_of_the_last_five_points():
    assert end_reward([9.0, 0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx(0.3)
    assert end_reward([0.1, 0.3]) == pytest.approx(0.2)


def test_c10_averages_the_area_of_the_first_ten_points_and_the_mean_of_the_last_five_of_them():
    rewards = [i / 10 for i in range(10)] + [99.0]
    assert c10(rewards) == pytest.approx((0.45 + 0.7) / 2)
    assert c10(rewards, mean_area) == pytest.approx((0.45 + 0.7) / 2)
    with pytest.raises(ValueError, match="C10 needs at least 10 points, got 9"):
        c10(rewards[:9])


@pytest.mark.parametrize("function", [trapezoid_area, mean_area, end_reward])
def test_no_points_have_no_number(function):
    with pytest.raises(ValueError, match="at least 1 point, got 0"):
        function([])


def test_smoothing_is_centred_and_narrows_at_the_ends():
    assert moving_average([0.0, 3.0, 6.0, 0.0], 3) == pytest.approx([1.5, 3.0, 3.0, 3.0])
    with pytest.raises(ValueError, match="odd"):
        moving_average([1.0], 4)


def test_a_world_is_judged_by_its_own_rule():
    rewards = [0.0, 0.2, 0.4, 0.8]
    household = curve_summary(rewards, "household")
    assert household.area == pytest.approx((0.1 + 0.3 + 0.6) / 3) and household.end == pytest.approx(0.35) and household.c10 is None
    math = curve_summary(rewards, "math")
    assert math.area == pytest.approx((0.1 + 0.6) / 2) and math.end == pytest.approx(0.35)
    assert curve_summary([0.4], "math").area == 0.4
    assert curve_summary([0.5] * 20, "math").c10 == pytest.approx(0.5)
